//! The workers of an engine, and which of them serves which peer.
//!
//! A rank may have several, each with a progress thread of its own, so that more than one core copies. All that goes on between
//! two ranks goes on between one worker of each, which both work out alike: what is said of a peer (that all it had sent has been
//! taken in, for one) is said by the one worker that it talks to.

use std::time::Instant;

use kvferry_layout::Digest;
use kvferry_wire::{Context, Event, OpenError, Permit, TransferId, Worker};

use crate::card::Card;
use crate::options::EngineOptions;

/// Workers of a rank, at most: a card with more is refused.
pub(crate) const WORKERS_MAX: usize = 64;

#[derive(Debug)]
pub(crate) struct Workers {
    all: Vec<Worker>,
    instance: String,
    rank: u32,
}

/// Which of `workers` workers serves a rank. Ranks of one instance are dealt out in turn, from another worker on for each instance.
fn serving(instance: &str, rank: u32, workers: usize) -> usize {
    let all = u64::try_from(workers).expect("at most WORKERS_MAX").max(1);
    let [first, rank] = [Digest::of(instance.as_bytes()).0, rank.into()].map(|number| number % u128::from(all));
    usize::try_from((first + rank) % u128::from(all)).expect("less than the number of workers")
}

impl Workers {
    /// Starts the workers that the options ask for, in one life. Each has a handler of its own.
    pub(crate) fn start<H: FnMut(Event) + Send + 'static>(
        context: &Context,
        options: &EngineOptions,
        epoch: u64,
        handler: impl Fn() -> H,
    ) -> Result<Self, OpenError> {
        let start = |_| Worker::start_with(context, epoch, handler());
        let all = (0..options.workers).map(start).collect::<Result<_, _>>()?;
        Ok(Self { all, instance: options.instance.clone(), rank: options.rank })
    }

    /// What peers need to connect, one a worker.
    pub(crate) fn addresses(&self) -> Vec<Vec<u8>> {
        self.all.iter().map(|worker| worker.address().to_owned()).collect()
    }

    /// The number of the worker that serves the rank of `card`.
    pub(crate) fn number_for(&self, card: &Card) -> usize {
        serving(&card.instance, card.rank, self.all.len())
    }

    /// The address of that rank's worker which serves this rank.
    pub(crate) fn address_of<'a>(&self, card: &'a Card) -> &'a [u8] {
        // A card that was parsed has one at least.
        card.addresses.get(serving(&self.instance, self.rank, card.addresses.len())).map_or(&[], Vec::as_slice)
    }

    /// The worker with a number that [`number_for`](Self::number_for) gave.
    pub(crate) fn get(&self, number: usize) -> &Worker {
        &self.all[number]
    }

    /// Gives up a transfer, whichever worker has it.
    pub(crate) fn cancel(&self, transfer: TransferId) {
        for worker in &self.all {
            let _ = worker.cancel(transfer); // stopped: ended with everything else
        }
    }

    /// See [`Worker::permit`]. A peer that is forgotten has no worker of its own any more, so all of them are asked.
    pub(crate) fn permit(&self, epoch: u64, permit: Permit) {
        self.all.iter().for_each(|worker| worker.permit(epoch, permit));
    }

    /// See [`Worker::expire`].
    pub(crate) fn expire(&self, epoch: u64, permit: Permit) {
        self.all.iter().for_each(|worker| worker.expire(epoch, permit));
    }

    /// See [`Worker::revoke`]. Returns how many workers will answer: the permit is revoked when the last has.
    pub(crate) fn revoke(&self, epoch: u64, permit: Permit) -> usize {
        for worker in &self.all {
            let _ = worker.revoke(epoch, permit); // stopped: it lets nothing in, and nobody waits for it
        }
        self.all.len()
    }

    /// Has what was commanded carried out: see [`Worker::carry_out`].
    pub(crate) fn carry_out(&self) {
        self.all.iter().for_each(Worker::carry_out);
    }

    /// See [`Worker::interrupt`].
    pub(crate) fn interrupt(&self) {
        self.all.iter().for_each(Worker::interrupt);
    }

    /// See [`Worker::progress`].
    pub(crate) fn progress(&self) {
        for worker in &self.all {
            worker.progress();
        }
    }

    /// See [`kvferry_wire::drive`].
    pub(crate) fn drive<T>(&self, deadline: Instant, done: impl FnMut() -> Option<T>) -> Option<T> {
        kvferry_wire::drive(&self.all, deadline, done)
    }

    pub(crate) fn stop(&self) {
        self.all.iter().for_each(Worker::stop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_dealt_out_evenly() {
        for workers in [1, 2, 3, 7, WORKERS_MAX] {
            for instance in ["", "prefill", "decode"] {
                let mut served = vec![0; workers];
                (0..u32::try_from(4 * workers).unwrap()).for_each(|rank| served[serving(instance, rank, workers)] += 1);
                assert!(served.iter().all(|ranks| *ranks == 4), "{workers} {instance}: {served:?}");
            }
        }
        let instances = (0..1000).map(|instance| serving(&format!("prefill-{instance}"), 0, 2));
        let second = instances.sum::<usize>();
        assert!((400..600).contains(&second), "{second} of 1000 instances of one rank");
        assert_eq!(serving("prefill", u32::MAX, 2), serving("prefill", 1, 2));
    }
}
