"""Students trained after a teacher: losses, features, a cache of the teacher's outputs, and one function that trains."""

from __future__ import annotations

from flatout.shrink.distil.distillation import Distilled, HeldOut, Length, Recipe, distil
from flatout.shrink.distil.features import Features
from flatout.shrink.distil.losses import attention_loss, hard_loss, hint_loss, logit_loss, top_k, top_k_loss
from flatout.shrink.distil.rollouts import Rollout
from flatout.shrink.distil.samples import Batch, Shuffled
from flatout.shrink.distil.scoring import accuracy, negative_bits, negative_error
from flatout.shrink.distil.teacher_cache import TeacherCache, write_teacher_cache
from flatout.shrink.distil.teachers import DistilObjective

__all__ = [
    "Batch",
    "DistilObjective",
    "Distilled",
    "Features",
    "HeldOut",
    "Length",
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
