"""What the depths that audits earn come to: how right they are, what they cost, and how soon they follow traffic."""
