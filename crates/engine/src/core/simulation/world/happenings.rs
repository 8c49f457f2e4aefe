//! What happens to what is on its way: writes move along, ranks hear of connections and deaths.

use kvferry_wire::Status;

use super::super::super::{Handle, Ticket};
use super::super::fixture::peers;
use super::super::network::{Frame, News, Way};
use super::{World, peer_of_life};

impl World {
    /// Moves one write along: a slot leaves its source, or lands.
    pub(super) fn step_write(&mut self, place: usize) {
        let (now, write) = (self.now, &mut self.writes[place]);
        let (from, to, key, way) = (write.from, write.to, write.key, write.way);
        // What is on its way lands by the destination's own hand.
        let lands = self.ranks.iter().any(|rank| rank.alive && rank.epoch == to && !rank.frozen);
        if lands && !write.flying.is_empty() && !self.random.one_in(2) {
            let slot = write.flying.swap_remove(self.random.below(write.flying.len()));
            self.books.write(from, to, key, slot);
        }
        let source = self.at(from);
        let gone = source.is_none();
        if let Some(index) = source.filter(|index| self.runs(*index)) {
            let failed = self.failed.contains(&(from, to));
            let write = &mut self.writes[place];
            if way == Way::Inbox && !write.told {
                write.told = true;
                let put = write.put;
                let actions = self.ranks[index].core.put_takes_inbox(put);
                self.act(index, actions);
            } else if way == Way::Inbox && write.let_in.is_none() && lands && !failed && !write.over {
                write.let_in = Some(self.permits.contains(&(from, to, write.serial)));
            }
            let write = &mut self.writes[place];
            if !write.over
                && !write.cancelled
                && !failed
                && (way != Way::Inbox || write.let_in == Some(true))
                && let Some(slot) = write.waiting.pop()
            {
                let link = self.ranks[index].link;
                self.books.read(from, Handle::Send(Ticket { link, key }));
                if way == Way::Direct {
                    self.books.write(from, to, key, slot);
                } else {
                    write.flying.push(slot);
                }
            }
            if let Some(result) = write.end(failed) {
                write.over = true;
                if failed && way == Way::Runs {
                    self.late.insert((from, to, key));
                }
                let (put, then) = (write.put, write.then.take().filter(|_| result.is_ok()));
                self.frames.extend(then.map(|message| Frame { from, to, message }));
                let actions = self.ranks[index].core.put_done(now, put, result);
                self.act(index, actions);
            }
        }
        let nowhere = self.at(to).is_none();
        let write = &mut self.writes[place];
        if nowhere {
            write.flying.clear();
        }
        if (write.over || gone) && write.flying.is_empty() {
            self.writes.swap_remove(place);
        }
    }

    pub(super) fn hear_news(&mut self, index: usize, news: News) {
        if !self.runs(index) {
            if self.ranks[index].alive {
                self.news.push((index, news));
            }
            return;
        }
        let (now, own) = (self.now, self.ranks[index].epoch);
        self.say(|| format!("{own}: {news:?}"));
        // What an engine's own threads do.
        let own_work = matches!(news, News::Dial(_) | News::Introduce { .. } | News::Sum(..) | News::Verify(..));
        if self.ranks[index].stopped && own_work {
            return;
        }
        let actions = match news {
            News::Lost(epoch) => {
                self.failed.insert((own, epoch));
                self.ranks[index].core.lost(now, epoch, Status::ERR_CONNECTION_RESET)
            }
            News::Died(epoch) => {
                // The wire takes in what the dead had sent before it says so.
                while let Some(place) = self
                    .writes
                    .iter()
                    .position(|write| write.from == epoch && write.to == own && !write.flying.is_empty())
                {
                    let write = &mut self.writes[place];
                    let (key, slot) = (write.key, write.flying.pop().unwrap());
                    if self.random.one_in(2) {
                        self.books.write(epoch, own, key, slot);
                    }
                }
                self.failed.insert((own, epoch));
                self.ranks[index].core.died(now, epoch)
            }
            News::Revoke(epoch, serial) => {
                for write in self.writes.iter_mut().filter(|w| (w.from, w.to, w.serial) == (epoch, own, serial)) {
                    if write.way == Way::Inbox {
                        write.let_in = Some(false);
                        write.flying.clear();
                    }
                }
                self.ranks[index].core.revoked(epoch, serial)
            }
            News::Sum(put, plan) => {
                let core = &mut self.ranks[index].core;
                if let Some((ticket, _)) = core.puts.get(&put) {
                    self.books.read(own, Handle::Send(*ticket));
                }
                core.summed(now, put, plan, 0)
            }
            News::Verify(epoch, about) => {
                self.books.read(own, Handle::Receive(about.key));
                let same = !self.random.one_in(16);
                self.ranks[index].core.verified(now, epoch, about, same)
            }
            News::Dial(epoch) if self.at(epoch).is_some() => {
                self.failed.remove(&(own, epoch));
                self.ranks[index].core.dialed(now, epoch)
            }
            News::Dial(epoch) => self.ranks[index].core.lost(now, epoch, Status::ERR_UNREACHABLE),
            News::Introduce { link, old, epoch, hello } => {
                let peers = peers(self.ranks[index].side, self.ranks[index].rank);
                let peer = peer_of_life(&peers, hello.rank, epoch);
                self.failed.remove(&(own, epoch));
                if self.at(epoch).is_none() {
                    self.news.push((index, News::Lost(epoch)));
                }
                self.ranks[index].core.replace(now, link, old, epoch, peer, *hello)
            }
        };
        self.act(index, actions);
    }
}
