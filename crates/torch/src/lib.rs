//! oxitorch-torch
