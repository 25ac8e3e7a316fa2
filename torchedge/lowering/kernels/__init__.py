"""From groups to kernel texts: nests, their schedules, and what is written of them."""
