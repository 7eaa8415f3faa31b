"""Students trained after a teacher: losses, features, a cache of the teacher's outputs, and one function that trains."""

from __future__ import annotations

from flatout.compression.distilling.distilled import Distilled, Held, Length, Recipe, distil
from flatout.compression.distilling.features import Features
from flatout.compression.distilling.losses import attention_loss, hard_loss, hint_loss, logit_loss, top_k, top_k_loss
from flatout.compression.distilling.rollouts import Rollout
from flatout.compression.distilling.samples import Batch, Shuffled
from flatout.compression.distilling.scoring import accuracy, negative_bits, negative_error
from flatout.compression.distilling.teacher_cache import TeacherCache, write_teacher_cache
from flatout.compression.distilling.teachers import Objective

__all__ = [
    "Batch",
    "Distilled",
    "Features",
    "Held",
    "Length",
    "Objective",
    "Recipe",
    "Rollout",
    "Shuffled",
    "TeacherCache",
    "accuracy",
    "attention_loss",
    "distil",
    "hard_loss",
    "hint_loss",
    "logit_loss",
    "negative_bits",
    "negative_error",
    "top_k",
    "top_k_loss",
    "write_teacher_cache",
]
