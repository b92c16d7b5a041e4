//! What the devices of a program send each other, and how its values are cut over a mesh.

use std::sync::Arc;

use super::Builder;
use crate::ir::{Binary, Collective, Op, Value};
use crate::sharding::{Mesh, ReplicaGroups, Sharding};

impl Builder {
    /// `stablehlo.all_reduce`: the members of each group have the same, element by element reduced over their operands.
    pub fn all_reduce(&self, x: Value, groups: &ReplicaGroups, op: Binary) -> Value {
        let region = self.binary_reducer(op, x);
        self.collective(Collective::AllReduce, groups, x, Some(region))
    }

    /// `stablehlo.all_gather`: the members' operands, one behind the other along `dim`.
    pub fn all_gather(&self, x: Value, dim: i64, groups: &ReplicaGroups) -> Value {
        self.collective(Collective::AllGather(dim), groups, x, None)
    }

    /// `stablehlo.reduce_scatter`: of the reduced operands each member has its part along `dim`.
    pub fn reduce_scatter(&self, x: Value, dim: i64, groups: &ReplicaGroups, op: Binary) -> Value {
        let region = self.binary_reducer(op, x);
        self.collective(Collective::ReduceScatter(dim), groups, x, Some(region))
    }

    /// `stablehlo.all_to_all`: each member cuts its operand along `split`, sends part `i` to member `i`, and puts what it is
    /// sent behind each other along `concat`.
    pub fn all_to_all(&self, x: Value, split: i64, concat: i64, groups: &ReplicaGroups) -> Value {
        self.collective(Collective::AllToAll { split, concat }, groups, x, None)
    }

    /// `stablehlo.collective_permute`: replica `.1` of each pair has the operand of replica `.0`; who is sent nothing has
    /// zeros.
    pub fn collective_permute(&self, x: Value, pairs: &[(i64, i64)]) -> Value {
        self.op(Op::CollectivePermute(pairs.to_vec()), &[x])
    }

    fn collective(&self, what: Collective, groups: &ReplicaGroups, x: Value, region: Option<u32>) -> Value {
        let op = Op::Collective(Box::new((what, groups.clone())));
        let regions: Vec<u32> = region.into_iter().collect();
        Value(self.op_full(op, &[x], &[], &regions).first)
    }

    /// The mesh over which the program's values are cut. Values are whole ones, and the compiler splits the program.
    pub fn set_mesh(&self, mesh: &Arc<Mesh>) {
        self.inner.borrow_mut().arena.mesh = Some(mesh.clone());
    }

    /// How many devices the compiler splits the program over.
    pub fn devices(&self) -> i64 {
        self.inner.borrow().arena.mesh.as_ref().map_or(1, |mesh| mesh.devices() as i64)
    }

    /// `sdy.sharding_constraint`: the value, cut so.
    pub fn sharding_constraint(&self, x: Value, sharding: &Arc<Sharding>) -> Value {
        let fits = self.inner.borrow().arena.check_sharding(sharding, &self.ty(x));
        if let Err(error) = fits {
            self.fail(error);
            return x;
        }
        self.op(Op::ShardingConstraint(sharding.clone()), &[x])
    }
}
