"""Which engine serves a class of work: routes that evidence stands behind, and monitors that move them back or down."""
