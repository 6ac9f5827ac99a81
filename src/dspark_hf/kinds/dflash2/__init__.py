"""DFlash2 drafters: DFlash with convolutions in its layers and a selector of candidates."""
