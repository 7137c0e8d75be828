"""Updates and files between sites: they are offered, sent in resumable pieces, verified, and acknowledged once
durable."""
