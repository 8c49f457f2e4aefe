//! Progress bars on standard error, drawn only if that is a terminal.

use std::collections::BTreeMap;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::event::Phase;
use crate::meet::Member;

/// One bar for each phase that has begun, over all ranks that reported.
#[derive(Debug)]
pub struct Bars {
    all: MultiProgress,
    bars: BTreeMap<Phase, Bar>,
}

#[derive(Debug)]
struct Bar {
    drawn: ProgressBar,
    ranks: BTreeMap<Member, (u64, Option<u64>)>,
}

impl Bars {
    /// No bars yet.
    pub fn new() -> Self {
        Self { all: MultiProgress::new(), bars: BTreeMap::new() }
    }

    /// One rank is `done_bytes` into a phase of `total_bytes`, if it knows.
    pub fn update(&mut self, member: Member, phase: Phase, done_bytes: u64, total_bytes: Option<u64>) {
        let all = &self.all;
        let bar = self.bars.entry(phase).or_insert_with(|| Bar { drawn: add(all, phase), ranks: BTreeMap::new() });
        bar.ranks.insert(member, (done_bytes, total_bytes));
        let done = bar.ranks.values().map(|(done, _)| *done);
        bar.drawn.set_position(done.fold(0, u64::saturating_add));
        let total = bar.ranks.values().try_fold(0, |sum: u64, (_, total)| Some(sum.saturating_add((*total)?)));
        match total {
            Some(total) => bar.drawn.set_length(total),
            None => bar.drawn.unset_length(),
        }
    }

    /// Takes the bars off the screen.
    pub fn clear(&mut self) {
        for bar in std::mem::take(&mut self.bars).into_values() {
            bar.drawn.finish_and_clear();
        }
    }
}

impl Default for Bars {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        self.clear();
    }
}

fn add(all: &MultiProgress, phase: Phase) -> ProgressBar {
    let name = match phase {
        Phase::Fill => "fill",
        Phase::Move => "move",
        Phase::Check => "check",
    };
    let template = "{prefix:5} [{bar:40}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec}";
    let style = ProgressStyle::with_template(template).expect("a template that a test has tried");
    all.add(ProgressBar::new(0).with_style(style.progress_chars("=> ")).with_prefix(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meet::Side;

    #[test]
    fn a_bar_sums_over_ranks() {
        let mut bars = Bars::new();
        let rank = |rank| Member { side: Side::Sender, rank };
        bars.update(rank(0), Phase::Fill, 1, Some(10));
        bars.update(rank(1), Phase::Fill, 5, Some(20));
        bars.update(rank(0), Phase::Fill, 10, Some(10));
        let bar = &bars.bars[&Phase::Fill].drawn;
        assert_eq!((bar.position(), bar.length()), (15, Some(30)));
        bars.update(rank(1), Phase::Fill, 6, None);
        let bar = &bars.bars[&Phase::Fill].drawn;
        assert_eq!((bar.position(), bar.length()), (16, None));
    }
}
