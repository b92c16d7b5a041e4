//! oxitorch-pjrt
