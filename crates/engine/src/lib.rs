//! oxitorch-engine
