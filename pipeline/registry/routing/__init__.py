"""Routing of classes of work to proven engines, and monitors that move routes back or down."""
