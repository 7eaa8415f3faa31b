"""Operations with several implementations each: the reference is the specification, the others are faster and bounded by it."""
