//! oxitorch-cache
