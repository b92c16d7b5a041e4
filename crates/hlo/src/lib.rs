//! oxitorch-hlo
