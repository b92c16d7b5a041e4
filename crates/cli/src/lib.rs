//! oxitorch-cli
