"""The parts a decoder is made of; each owns the rule by which it is sharded."""
