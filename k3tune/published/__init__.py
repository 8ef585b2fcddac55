"""What Moonshot publishes: config, tensor table, files. Standard library only, so it is quick.

``architecture`` reads the config, ``tensor_table`` derives every tensor from it,
``safetensors_files`` and ``survey`` judge the files against both, ``inspection`` reports.
"""
