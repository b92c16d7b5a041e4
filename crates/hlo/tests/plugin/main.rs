//! The CPU plugin accepts what the printer writes, and computes what the documentation says. One file per op family.

mod common;
mod constant;
mod contract;
mod control;
mod elementwise;
mod generate;
mod index;
mod random;
mod reduce;
mod shape;
