"""The savings and costs of APS, as tables and figures; see README.md here."""
