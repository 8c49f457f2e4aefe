//! The scheduler: first trouble, then healing.

use std::time::Duration;

use super::super::super::Handle;
use super::super::fixture::DESTINATIONS;
use super::super::network::News;
use super::World;
use super::users::Deed;
use crate::message::RequestKey;

/// Steps of trouble.
const STEPS: usize = 1200;

/// Steps between which time passes, once everything is well again, and how many there may be.
const HEALING_STEP: Duration = Duration::from_millis(100);
const HEALING_STEPS: usize = 2000;

impl World {
    /// Everything that can go wrong.
    pub(in crate::core::simulation) fn trouble(&mut self) {
        for _ in 0..STEPS {
            let index = self.random.below(self.ranks.len());
            match self.random.below(100) {
                0..40 => {
                    let Some(frame) = self.random.take(&mut self.frames) else { continue };
                    if self.random.one_in(self.bad) {
                        if self.random.one_in(2) {
                            continue; // lost
                        }
                        self.frames.push(frame.clone());
                    }
                    self.deliver(frame);
                }
                40..62 if !self.writes.is_empty() => {
                    let place = self.random.below(self.writes.len());
                    self.step_write(place);
                }
                62..78 => {
                    if let Some((index, deed)) = self.random.take(&mut self.deeds) {
                        self.do_deed(index, deed);
                    }
                }
                78..84 if self.keys.len() < 24 => {
                    self.post();
                }
                84..88 => {
                    let time = Duration::from_millis([1, 50, 300, 3000][self.random.below(4)]);
                    self.pass(time);
                }
                88..93 => {
                    if let Some((index, news)) = self.random.take(&mut self.news) {
                        self.hear_news(index, news);
                    }
                }
                93 if !self.keys.is_empty() => {
                    let key = self.keys[self.random.below(self.keys.len())];
                    self.deeds.push((index, Deed::Cancel { key }));
                }
                94 if self.ranks[index].alive => {
                    let epoch = self.ranks[index].epoch;
                    self.say(|| format!("{epoch}: frozen or continued"));
                    self.ranks[index].frozen ^= true;
                }
                95 if self.ranks[index].alive => match self.random.below(4) {
                    0 if self.runs(index) && !self.ranks[index].stopped => {
                        self.stop(index);
                        if self.random.one_in(2) {
                            self.kill(index);
                        }
                    }
                    1 | 2 => self.kill(index),
                    _ => self.disconnect(index),
                },
                96 | 97 if !self.ranks[index].alive => self.restart(index),
                98 if self.random.one_in(2) => {
                    // A connection fails, on one side.
                    let others = self.ranks.iter().filter(|other| other.side != self.ranks[index].side);
                    let others: Vec<u64> = others.map(|other| other.epoch).collect();
                    let epoch = others[self.random.below(others.len())];
                    self.news.push((index, News::Lost(epoch)));
                }
                99 if self.ranks[index].connected == Some(false) && self.runs(index) => self.connect(index),
                _ => {}
            }
        }
    }

    /// Lets everything that is on its way happen.
    fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 10_000, "the ranks never stop talking");
            for (index, news) in std::mem::take(&mut self.news) {
                self.hear_news(index, news);
            }
            for (index, deed) in std::mem::take(&mut self.deeds) {
                self.do_deed(index, deed);
            }
            for place in (0..self.writes.len()).rev() {
                self.step_write(place);
            }
            let frames = std::mem::take(&mut self.frames);
            if frames.is_empty() && self.writes.is_empty() && self.news.is_empty() && self.deeds.is_empty() {
                return;
            }
            for frame in frames {
                self.deliver(frame);
            }
        }
    }

    /// Nothing goes wrong any more: everything that was begun ends, what cannot be given back is accounted for, and a new
    /// request succeeds.
    pub(in crate::core::simulation) fn heal(&mut self) {
        self.say(|| "all is well again".to_owned());
        for index in 0..self.ranks.len() {
            self.ranks[index].frozen = false;
            if self.ranks[index].stopped && self.ranks[index].alive {
                self.kill(index);
            }
            if !self.ranks[index].alive {
                self.restart(index);
            }
        }
        let mut proof = None;
        for step in 0.. {
            self.settle();
            self.pass(HEALING_STEP);
            self.settle();
            for index in 0..self.ranks.len() {
                if self.ranks[index].connected == Some(false) {
                    self.connect(index);
                }
            }
            // Slots that nothing gives back are lost until the rank restarts.
            for index in 0..self.ranks.len() {
                let epoch = self.ranks[index].epoch;
                if step > 20 && self.books.open(epoch).0.is_empty() && self.books.free(epoch).len() < 3 {
                    self.kill(index);
                    self.restart(index);
                }
            }
            // Users try, until a request succeeds everywhere.
            let posted = proof.filter(|key| self.is_open(*key));
            let over = proof.is_some_and(|key| self.well.get(&key) == Some(&usize::try_from(DESTINATIONS).unwrap()));
            if over && self.ranks.iter().all(|rank| self.books.open(rank.epoch).0.is_empty()) {
                break;
            }
            if posted.is_none() && !over {
                proof = Some(self.post());
            }
            assert!(step < HEALING_STEPS, "no request succeeds, or some never end");
        }
        // Whoever was asked to stop has been asked again by then.
        for _ in 0..200 {
            self.pass(HEALING_STEP);
            self.settle();
        }
        for rank in &self.ranks {
            let (_, exposed) = self.books.open(rank.epoch);
            let mut listed: Vec<Handle> =
                rank.core.quarantine().iter().map(|quarantined| Handle::Receive(quarantined.key)).collect();
            listed.dedup();
            assert_eq!(exposed, listed, "slots of {} are neither given back nor accounted for", rank.epoch);
            // Those who are there have answered. Only what is gone, or what a network may still deliver, holds slots, and not
            // where they are written by this side.
            for quarantined in rank.core.quarantine() {
                let (epoch, key) = (quarantined.epoch, quarantined.key);
                let late = quarantined.unsettled && self.late.contains(&(epoch, rank.epoch, key));
                let gone = self.at(epoch).is_none() && !self.one_host;
                let inbox_only = rank.core.receives[&key].parts[&epoch].inbox_only;
                assert!((late || gone) && !inbox_only, "{quarantined:?} could be given back");
            }
        }
    }

    fn is_open(&self, key: RequestKey) -> bool {
        let deeds = self
            .deeds
            .iter()
            .any(|(_, deed)| matches!(deed, Deed::Receive { key: of, .. } | Deed::Send { key: of, .. } if *of == key));
        deeds || self.ranks.iter().any(|rank| self.books.open(rank.epoch).0.iter().any(|handle| handle.key() == key))
    }
}
