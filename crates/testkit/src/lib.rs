//! oxitorch-testkit
