from __future__ import annotations

from flatout.profiling.patching import Patches


class Parent:
    def greet(self) -> str:
        return "parent"


class Child(Parent):
    own = 1


def test_undo_restores_an_attribute_and_removes_one_that_was_inherited() -> None:
    inherited = Child.greet
    patches = Patches()
    patches.set(Child, "own", 2)
    patches.set(Child, "greet", lambda self: "patched")
    assert (Child.own, Child().greet()) == (2, "patched")

    patches.undo()

    assert Child.own == 1
    assert "greet" not in vars(Child)
    assert Child.greet is inherited


def test_undo_of_two_patches_of_one_attribute_restores_the_first_value() -> None:
    patches = Patches()
    patches.set(Child, "own", 2)
    patches.set(Child, "own", 3)

    patches.undo()
    patches.undo()

    assert Child.own == 1
