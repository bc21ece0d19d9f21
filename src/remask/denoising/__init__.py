"""Rules of denoising that requests and models name: remasking, choices, edits and noise, without tensors."""
