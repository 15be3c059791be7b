"""What APS saves and costs, as tables and figures; see README.md here."""
