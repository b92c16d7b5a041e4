//! oxitorch-aten
