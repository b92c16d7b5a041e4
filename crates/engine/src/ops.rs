//! Recorded ops in their order: instances, the Python line of each, where its operands come from, and its offsets.

use crate::inst::Inst;
use crate::shared::Shared;
use crate::site::Site;
use oxitorch_hlo::DType;
use rustc_hash::FxHashSet;

/// In operand codes: the value is result number `code & !PRODUCED` of the ops, not one of their inputs.
pub(crate) const PRODUCED: u32 = 1 << 31;

/// A dimension of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Along {
    /// The value's operand code.
    value: u32,
    /// As what it is seen.
    dtype: DType,
    /// How many elements are from one place to the next.
    stride: i64,
}

#[cfg(test)]
impl Along {
    /// A dimension of an input.
    pub(crate) fn of_input(value: u32, stride: i64) -> Along {
        Along { value, dtype: DType::F32, stride }
    }
}

/// A sequence of recorded ops.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ops {
    pub(crate) insts: Vec<Shared<Inst>>,
    /// The Python line of each.
    pub(crate) sites: Vec<Site>,
    /// The operands of all, one after another: input number, or [`PRODUCED`] and the number of a result.
    pub(crate) operands: Vec<u32>,
    /// The offsets of all, one after another; see [`oxitorch_aten::args::Offset`].
    pub(crate) offsets: Vec<i64>,
}

/// One op of a sequence.
#[derive(Clone, Copy)]
pub(crate) struct OpRef<'a> {
    /// Its place.
    pub(crate) at: usize,
    pub(crate) inst: &'a Shared<Inst>,
    pub(crate) site: Site,
    pub(crate) operands: &'a [u32],
    pub(crate) offsets: &'a [i64],
    /// The place of its first offset among all.
    pub(crate) first_offset: usize,
    /// The number of its first result.
    pub(crate) first_result: usize,
}

impl OpRef<'_> {
    /// The numbers of its results.
    pub(crate) fn results(&self) -> std::ops::Range<usize> {
        self.first_result..self.first_result + self.inst.outputs.len()
    }
}

impl Ops {
    pub(crate) fn len(&self) -> usize {
        self.insts.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.insts.is_empty()
    }

    /// Whether they are of no use at a larger size: what fails is to be found op by op, and what is kept on the host has its
    /// own size there.
    pub(crate) fn have_own_sizes(&self) -> bool {
        self.insts.iter().any(|inst| inst.may_fail() || inst.memory().is_some())
    }

    pub(crate) fn clear(&mut self) {
        self.insts.clear();
        self.sites.clear();
        self.operands.clear();
        self.offsets.clear();
    }

    /// The ops in their order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = OpRef<'_>> {
        let (mut operand, mut offset, mut result) = (0, 0, 0);
        self.insts.iter().zip(&self.sites).enumerate().map(move |(at, (inst, &site))| {
            let op = OpRef {
                at,
                inst,
                site,
                operands: &self.operands[operand..][..inst.operands.len()],
                offsets: &self.offsets[offset..][..inst.offsets],
                first_offset: offset,
                first_result: result,
            };
            operand += op.operands.len();
            offset += op.offsets.len();
            result += inst.outputs.len();
            op
        })
    }

    /// Appends an op on other operands.
    pub(crate) fn push(&mut self, op: &OpRef<'_>, operands: impl IntoIterator<Item = u32>) {
        self.insts.push(op.inst.clone());
        self.sites.push(op.site);
        self.operands.extend(operands);
        self.offsets.extend_from_slice(op.offsets);
    }

    /// The places of all offsets of the ops that these offsets are of: who moves along one dimension soon moves along
    /// another.
    pub(crate) fn whole(&self, offsets: &[u32]) -> Box<[u32]> {
        let all = |op: &OpRef<'_>| op.first_offset as u32..(op.first_offset + op.offsets.len()) as u32;
        let moves = |range: &std::ops::Range<u32>| offsets.iter().any(|at| range.contains(at));
        self.iter().map(|op| all(&op)).filter(moves).flatten().collect()
    }

    /// What each offset says where in, if it is a dimension of a value of which one of the ops overwrites a part.
    pub(crate) fn along(&self) -> Vec<Option<Along>> {
        let base = |op: &OpRef<'_>| op.operands.first().copied();
        let written: FxHashSet<u32> =
            self.iter().filter(|op| op.inst.is_write()).filter_map(|op| base(&op)).collect();
        let mut along = Vec::with_capacity(self.offsets.len());
        for op in self.iter() {
            if let Some(value) = base(&op).filter(|value| written.contains(value)) {
                along.extend(op.inst.along().map(|(dtype, stride)| Some(Along { value, dtype, stride })));
            }
            along.resize(op.first_offset + op.offsets.len(), None);
        }
        along
    }

    /// How many results they have.
    pub(crate) fn results(&self) -> usize {
        self.insts.iter().map(|i| i.outputs.len()).sum()
    }
}
