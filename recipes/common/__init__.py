"""What the recipes share: steps of an optimizer, runs that go on where they were cut short, command lines."""
