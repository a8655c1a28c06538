"""Layer operations of the engine (design section 7): NumPy float32, the reference."""
