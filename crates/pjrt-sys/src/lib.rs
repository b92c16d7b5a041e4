//! oxitorch-pjrt-sys
