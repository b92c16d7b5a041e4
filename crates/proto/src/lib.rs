//! oxitorch-proto
