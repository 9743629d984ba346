"""The engine process of a worker. `main` starts it, `assembly` builds it, `loop` runs it.

`prefill` and `decode` are its two sides, `startup` loads the model and sets up memory and links; `commands`
handles what the front requests. Imported only from within this folder; the front starts it as a process.
"""
