"""From groups to kernel texts: one file a template of export/kernels."""
