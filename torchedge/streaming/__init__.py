"""Streaming: which layer loads which chunk of which weight (FlashMem), provably well, and what it takes."""
