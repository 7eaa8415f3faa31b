"""What an implementation of a product is: a kernel that binds to one problem, in one or more variants that can be measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from flatout.blocks.kernels.matmul.autograd import run_kernel
from flatout.blocks.kernels.matmul.problem import MatmulProblem, matmul_problem
from flatout.blocks.kernels.matmul.variant import Runner, Variant
from flatout.core.errors import UsageError
from flatout.core.records.kernel import Kernel
from flatout.core.registry import kernels


class MatmulKernel(Kernel, frozen=True, kw_only=True):
    """A kernel whose variants are measured for each problem; the constant KERNEL of a module in this package.

    `name` is what tables and variants call it. `problem_refusal` tells why a problem cannot be run, None when it can;
    `variants` returns what is worth measuring for a problem that is not refused, the best guess first; `bind` returns what
    runs one of them (compiling, and its errors, come at the first run). `is_slow_to_compile`: it is measured on request only.
    """

    problem_refusal: Callable[[MatmulProblem], str | None]
    variants: Callable[[MatmulProblem], tuple[Variant, ...]]
    bind: Callable[[MatmulProblem, Variant], Runner]
    is_slow_to_compile: bool = False

    @property
    def name(self) -> str:
        return self.id.removeprefix("matmul.")


def matmul_kernel(
    name: str,
    title: str,
    bind: Callable[[MatmulProblem, Variant], Runner],
    *,
    order: int,
    refusal: Callable[[MatmulProblem], str | None] = lambda problem: None,
    variants: Callable[[MatmulProblem], tuple[Variant, ...]] | None = None,
    is_slow_to_compile: bool = False,
) -> MatmulKernel:
    """The kernel 'matmul.<name>'; it has one variant unless `variants` returns others, and refuses nothing without `refusal`.

    Called as a kernel it runs its first variant, and takes b for a matrix that stays the same.
    """
    variants_of = variants or (lambda problem: (Variant(name=name),))

    def run(a: Tensor, b: Tensor, *sides: Tensor | None, **options: Any) -> Tensor:
        return run_kernel(lambda problem: bind(problem, variants_of(problem)[0]), a, b, *sides, **options)

    def refuses(a: Tensor, b: Tensor, *sides: Tensor | None, **options: Any) -> str | None:
        return refusal(matmul_problem(a, b, *sides, is_constant=True, **options))

    return MatmulKernel(
        id=f"matmul.{name}",
        title=title,
        module=bind.__module__,
        run=run,
        refusal=refuses,
        order=order,
        problem_refusal=refusal,
        variants=variants_of,
        bind=bind,
        is_slow_to_compile=is_slow_to_compile,
    )


class ProblemVariants(NamedTuple):
    """Variants that can be measured for a problem, the vendor's first, and by name why other implementations cannot."""

    variants: tuple[Variant, ...]
    refusals: tuple[tuple[str, str], ...]


def implementations() -> tuple[MatmulKernel, ...]:
    """Every implementation that can be measured, the vendor's library first: it is what others have to beat."""
    return tuple(kernel for kernel in kernels("matmul") if isinstance(kernel, MatmulKernel))


def variants_of(problem: MatmulProblem, *, has_compiled: bool = False) -> ProblemVariants:
    """What can be measured for a problem; `has_compiled`: also what takes long to compile, as torch.compile's templates."""
    found: list[Variant] = []
    refusals: list[tuple[str, str]] = []
    for kernel in implementations():
        is_skipped = kernel.is_slow_to_compile and not has_compiled
        why = "not asked for" if is_skipped else kernel.problem_refusal(problem)
        if why is None:
            found += kernel.variants(problem)
        else:
            refusals.append((kernel.name, why))
    return ProblemVariants(tuple(found), tuple(refusals))


def bound(problem: MatmulProblem, variant: Variant) -> Runner:
    """What runs this variant. Compiling, and errors of it, come at the first run.

    Raises:
        UsageError: No implementation has the variant's name.
    """
    known = {kernel.name: kernel for kernel in implementations()}
    if variant.name not in known:
        raise UsageError(f"no implementation of matmul is called '{variant.name}'; measure the problem again")
    return known[variant.name].bind(problem, variant)
