//! How much work the compiler puts into programs, and which of them are worth more.

use oxitorch_pjrt::Platform;

use crate::answer::{Judged, Judgement};
use crate::compile::{Asked, Effort};
use crate::verdict::Verdict;

impl Asked {
    /// What all programs are compiled with.
    pub(crate) fn first(self) -> Effort {
        if self == Asked::Full { Effort::Full } else { Effort::Fast }
    }

    /// How programs were compiled, in words.
    pub(crate) fn words(self, judged: &[Judged]) -> String {
        if !judged.is_empty() && judged.iter().all(|j| j.platform == Platform::Cuda.name()) {
            return "compiled as for a run, but for what only a GPU can measure".to_owned();
        }
        let programs = judged.iter().flat_map(|j| &j.programs);
        let full = programs.filter(|p| p.effort == Effort::Full && self == Asked::Auto).count();
        match self {
            Asked::Full => "compiled with full effort, as a run has it in the end".to_owned(),
            Asked::Fast => {
                "compiled with little effort; --effort full is what a run has in the end".to_owned()
            }
            Asked::Auto if full == 0 => {
                "compiled with little effort, as none is near the limit; a run has full effort in the end"
                    .to_owned()
            }
            Asked::Auto => format!(
                "compiled with little effort, but {full} near the limit with full effort, as a run has it in the end"
            ),
        }
    }
}

/// How far temporaries and machine code grow at most with full effort, as multiples of fast mode's: with something to
/// spare beyond what was measured (docs/preflight.md).
const GROWTH: f64 = 1.25;
const CODE_GROWTH: f64 = 6.0;

/// The programs that full effort could put on the other side of the limit, or of one in bytes from the budget.
///
/// Arguments and results stay as they are. Temporaries may be nearly none where fast mode has many: then ops are fused,
/// and what does not fit is computed again.
pub(crate) fn undecided(judged: &Judged, budget: &[u64]) -> Vec<String> {
    let limit = judged.limit_bytes.unwrap_or(u64::MAX);
    let lines = [&[limit, Verdict::barely(limit)], budget].concat();
    let mut ids: Vec<String> =
        judged.programs.iter().filter(|p| is_undecided(p, &lines)).map(|p| p.id.clone()).collect();
    ids.sort();
    ids.dedup();
    ids
}

fn is_undecided(p: &Judgement, lines: &[u64]) -> bool {
    let (Some(need), Some(memory)) = (p.need_bytes, p.memory_bytes) else { return true };
    let least = need.saturating_sub(memory.temporaries);
    let code = need.saturating_sub(memory.peak + p.beside_bytes);
    let more = memory.temporaries as f64 * (GROWTH - 1.0) + code as f64 * (CODE_GROWTH - 1.0);
    let most = need.saturating_add(more as u64);
    lines.iter().any(|line| (least..most).contains(line))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::Memory;
    use crate::hardware::Slice;

    #[test]
    fn for_gpus_there_is_one_effort() {
        let judged = |name: &str| Judged::unknown(&Slice::parse(name).unwrap(), String::new());
        let words = |names: &[&str]| Asked::Auto.words(&names.iter().map(|n| judged(n)).collect::<Vec<_>>());
        assert!(words(&["cuda:h200", "cuda:l4"]).starts_with("compiled as for a run"));
        assert!(words(&["cuda:h200", "v5e-1"]).starts_with("compiled with little effort"));
    }

    #[test]
    fn only_what_temporaries_decide_is_worth_more() {
        let memory = Memory { arguments: 600, temporaries: 400, peak: 1000, ..Memory::default() };
        let p = Judgement { need_bytes: Some(1010), memory_bytes: Some(memory), ..Judgement::default() };
        for (line, expected) in [(609, false), (610, true), (1010, true), (1159, true), (1160, false)] {
            assert_eq!(is_undecided(&p, &[line]), expected, "{line}");
        }
        assert!(is_undecided(&p, &[10, 700]));
        assert!(is_undecided(&Judgement::default(), &[]), "nothing is known");
        let slice = Slice::parse("v5e-1").unwrap();
        let judged = |p| Judged { programs: vec![p], ..Judged::unknown(&slice, String::new()) };
        let again = Judgement { id: "a".into(), ..Judgement::default() };
        assert_eq!(undecided(&judged(again), &[]), ["a"]);
    }
}
