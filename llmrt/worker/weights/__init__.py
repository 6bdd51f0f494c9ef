"""Reading the tensors of a checkpoint, each rank only its part.

open_weights.py        which reader a checkpoint needs
reader.py              WeightReader: what the layers see
safetensors_reader.py  one file or many, found by shards.py
gguf_reader.py         one file, found by an index the driver wrote; decoded by gguf_blocks.py
read_record.py         what has been read so far: progress, and what nobody wanted
"""
