"""The kinds of drafter, a folder for each: its configuration and its model.

A new kind is a new folder here, with a subclass of `configuration_drafter.DrafterConfig` and one of `drafter.Drafter`. It is
registered in `dspark_hf/__init__.py`. It may bring a reader of its public files (in `checkpoints/`, listed in
`reading.FORMATS`) and, unless it drafts a block of slots as DSpark does, a candidate generator (in `generation/`, listed in
`generators.GENERATORS`).
"""
