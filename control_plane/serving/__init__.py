"""What the control plane's process is made of: addresses, its database, standing by, its web pages and its tracker."""
