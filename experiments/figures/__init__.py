"""The savings and costs of APS, as tables and figures. See the README.md in this directory."""
