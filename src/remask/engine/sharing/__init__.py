"""Ways in which requests share K/V: a file each, behind one interface (`way.Sharing`)."""
