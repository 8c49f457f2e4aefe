//! Who sends what: for every cell that a destination rank holds, exactly one source rank.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use kvferry_layout::{Digest, Layer, PageTable, Role};

use crate::balance::Balance;
use crate::classes::{Class, classes};
use crate::error::{MatchError, TemplateError};
use crate::geometry::Geometry;
use crate::layers::LayerList;
use crate::load::{Along, Load, Wants};
use crate::rows::{Matched, SourceRows, Wanted};
use crate::shares::{Share, Sharing};
use crate::template::Template;
use crate::text;
use crate::transcript::Transcript;

/// Which source ranks send which cells to one destination rank. Made by [`assign`]; owns all it needs of the tables.
#[derive(Clone, Debug)]
pub struct Assignment {
    destination_rank: u32,
    destination: Arc<Wants>,
    geometry: Arc<Geometry>,
    /// Ascending by rank.
    senders: Vec<Sender>,
    digest: Digest,
}

/// A load, and the slots of the source rank and the destination rank that it is between.
pub(crate) type Between<'a> = (&'a Arc<Load>, &'a Arc<Geometry>, &'a Arc<Geometry>);

#[derive(Clone, Debug)]
struct Sender {
    rank: u32,
    geometry: Arc<Geometry>,
    load: Arc<Load>,
}

/// Chooses a source rank for every cell (layer, role, plane, unit, token) that each destination rank holds, and proves that
/// there is one.
///
/// - `sources`: ranks and tables of the source instance, each rank once. A request's cache is in one data-parallel part of
///   the instance: give all ranks of that part ([`PageTable::dp_rank`]), and none of another one.
/// - `destinations`: ranks and tables of the destination instance, each rank once. Of an instance with several
///   data-parallel parts give those that are of interest, each with all its ranks.
/// - returns an assignment for each destination, in their order.
///
/// Every table must have passed [`PageTable::check`]. The result depends on the arguments only, so that each side can
/// compute it and compare [`Assignment::digest`].
///
/// Where several source ranks hold the same cells, each of them sends an equal share, to within a row, of what the ranks of
/// a destination part want of them in all: a request goes to one such part. A source rank that alone holds other cells sends
/// that much less.
///
/// A destination without rows has an assignment without sources. Layers past the hidden ones (MTP, draft layers) that no
/// source rank holds are no error: [`Assignment::one_sided`] lists them.
///
/// Ranks of equal layout are looked at once. Time and memory grow with layouts, and with ranks that talk to each other; not
/// with pairs of ranks.
///
/// # Errors
///
/// The first thing that keeps a destination from being served, see [`MatchError`].
pub fn assign<'a>(
    sources: impl IntoIterator<Item = (u32, &'a PageTable)>,
    destinations: impl IntoIterator<Item = (u32, &'a PageTable)>,
) -> Result<Vec<Assignment>, MatchError> {
    let (sources, destinations): (Vec<_>, Vec<_>) = (sources.into_iter().collect(), destinations.into_iter().collect());
    prove_one_part(&sources)?;
    let (source_classes, source_class_of) = classes(&sources);
    let (destination_classes, destination_class_of) = classes(&destinations);
    let rows = SourceRows::new(&source_classes);
    let matches = destination_classes.iter().enumerate().map(|(index, class)| Match::new(&rows, index, class));
    let matches: Vec<Match<'_>> = matches.collect::<Result<_, _>>()?;

    let source_geometries = geometries(&sources, &source_class_of);
    let source_of: HashMap<u32, (usize, &Arc<Geometry>)> = sources
        .iter()
        .zip(source_class_of.iter().zip(&source_geometries))
        .map(|((rank, _), (class, geometry))| (*rank, (*class, geometry)))
        .collect();
    let senders = choose(&source_classes, &matches, &destinations, &destination_class_of);

    let mut loads = HashMap::new();
    let destination_geometries = geometries(&destinations, &destination_class_of);
    let of_destinations = destinations.iter().zip(destination_geometries).zip(destination_class_of.iter().zip(senders));
    let assignments = of_destinations.map(|(((rank, _), geometry), (class, shares_of))| {
        let Match { wanted, wants, shares } = &matches[*class];
        let sender = |(rank, of_rank): (u32, Vec<usize>)| {
            let (source_class, geometry) = source_of[&rank];
            let load = loads.entry((source_class, *class, of_rank)).or_insert_with_key(|(source_class, _, of_rank)| {
                let table = source_classes[*source_class].table;
                let shares = of_rank.iter().map(|share| &shares[*share]);
                let load = Load::new(*source_class, table, wanted, wants, shares);
                (load.digest(), Arc::new(load))
            });
            (load.0, Sender { rank, geometry: Arc::clone(geometry), load: Arc::clone(&load.1) })
        };
        let (digests, senders): (Vec<Digest>, Vec<Sender>) = shares_of.into_iter().map(sender).unzip();
        let mut transcript = Transcript::new("kvferry assignment 2");
        transcript.word(*rank);
        for (sender, digest) in senders.iter().zip(digests) {
            transcript.word(sender.rank);
            transcript.digest(digest);
        }
        let destination = Arc::clone(wants);
        Assignment { destination_rank: *rank, destination, geometry, senders, digest: transcript.finish() }
    });
    Ok(assignments.collect())
}

/// A destination class and what each of its ranks wants of whom.
struct Match<'a> {
    wanted: Vec<Wanted<'a>>,
    wants: Arc<Wants>,
    shares: Vec<Share>,
}

impl<'a> Match<'a> {
    fn new(rows: &SourceRows<'a>, index: usize, destination: &'a Class<'a>) -> Result<Self, MatchError> {
        let Matched { wanted, one_sided } = rows.wanted_by(index, destination)?;
        let shares = Sharing::new(rows.classes(), destination, &wanted).shares()?;
        let wants = Arc::new(Wants::new(destination.table, &wanted, one_sided));
        Ok(Self { wanted, wants, shares })
    }
}

fn prove_one_part(sources: &[(u32, &PageTable)]) -> Result<(), MatchError> {
    let Some(((source_rank, first), rest)) = sources.split_first() else { return Ok(()) };
    match rest.iter().find(|(_, table)| table.dp_rank != first.dp_rank) {
        None => Ok(()),
        Some((other_rank, other)) => Err(MatchError::SourceParts {
            source_rank: *source_rank,
            dp_rank: first.dp_rank,
            other_rank: *other_rank,
            other_dp_rank: other.dp_rank,
        }),
    }
}

/// For each destination: which of its class's shares each source rank sends. Ranks of one data-parallel part, which serve the
/// same requests, are chosen for together.
fn choose(
    sources: &[Class<'_>],
    matches: &[Match<'_>],
    destinations: &[(u32, &PageTable)],
    class_of: &[usize],
) -> Vec<BTreeMap<u32, Vec<usize>>> {
    let mut parts = BTreeMap::<u32, Vec<usize>>::new();
    for (index, (_, table)) in destinations.iter().enumerate() {
        parts.entry(table.dp_rank).or_default().push(index);
    }
    let mut senders = vec![BTreeMap::<u32, Vec<usize>>::new(); destinations.len()];
    for (dp_rank, mut members) in parts {
        side_by_side(&mut members, class_of);
        let mut balance = Balance::default();
        let mut sets_of = HashMap::<usize, Vec<usize>>::new();
        for member in &members {
            let Match { wanted, shares, .. } = &matches[class_of[*member]];
            let sets = sets_of.entry(class_of[*member]).or_insert_with(|| {
                let set = |share: &Share| {
                    let Wanted { row, holders } = &wanted[share.row];
                    let classes = share.holders.iter().map(|holder| &sources[holders[*holder].class]);
                    let mut ranks: Vec<u32> = classes.flat_map(|class| class.ranks.iter().copied()).collect();
                    ranks.sort_unstable();
                    balance.set(row.kind, ranks)
                };
                shares.iter().map(set).collect()
            });
            for (share, set) in shares.iter().zip(sets) {
                balance.add(*set, share.bytes);
            }
        }
        let mut chosen = balance.choose(dp_rank);
        for member in members {
            for (share, set) in sets_of[&class_of[member]].iter().enumerate() {
                senders[member].entry(chosen.next(*set)).or_default().push(share);
            }
        }
    }
    senders
}

/// Puts ranks that are at the same point of their classes next to each other. Replicas are given stretches of ranks, and so
/// each gets about as many of every class. Class after class, the last replica would have all that a class wants least of: a
/// row each of many ranks, say.
fn side_by_side(members: &mut [usize], class_of: &[usize]) {
    let mut counts = HashMap::<usize, u64>::new();
    let places = members.iter().map(|member| {
        let count = counts.entry(class_of[*member]).or_default();
        *count += 1;
        (*member, 2 * *count - 1)
    });
    let places: HashMap<usize, u64> = places.collect();
    // The middle of the k-th of n, as a share of all. Ranks are fewer than 2^32, and so nothing overflows.
    let share = |member: &usize| (places[member], 2 * counts[&class_of[*member]]);
    members.sort_by(|a, b| {
        let (a, b) = (share(a), share(b));
        (a.0 * b.1).cmp(&(b.0 * a.1))
    });
}

/// One a rank; ranks of a class mostly have the same.
fn geometries(ranks: &[(u32, &PageTable)], class_of: &[usize]) -> Vec<Arc<Geometry>> {
    let mut of_class = HashMap::<usize, Arc<Geometry>>::new();
    let geometry = |((_, table), class): (&(u32, &PageTable), &usize)| {
        let geometry = Arc::new(Geometry::of(table));
        let first = of_class.entry(*class).or_insert_with(|| Arc::clone(&geometry));
        if **first == *geometry { Arc::clone(first) } else { geometry }
    };
    ranks.iter().zip(class_of).map(geometry).collect()
}

impl Assignment {
    /// The destination rank that this is for.
    pub fn destination_rank(&self) -> u32 {
        self.destination_rank
    }

    /// Source ranks that send to the destination rank, ascending.
    pub fn sources(&self) -> impl Iterator<Item = u32> + '_ {
        self.senders.iter().map(|sender| sender.rank)
    }

    /// Rows (layer, role) of which `source_rank` sends at least a part; 0 for a rank that sends nothing.
    pub fn rows(&self, source_rank: u32) -> u64 {
        self.sender(source_rank).map_or(0, |sender| sender.load.rows())
    }

    /// Layers of which `source_rank` sends at least a part of a row; none for a rank that sends nothing.
    pub fn layers(&self, source_rank: u32) -> LayerList {
        let load = self.sender(source_rank).map(|sender| &sender.load);
        load.into_iter().flat_map(|load| load.parts.iter().map(|part| load.row(part).0)).collect()
    }

    /// Layers of the destination rank, all past the hidden ones, that no source rank holds. Nobody writes their rows.
    pub fn one_sided(&self) -> &[Layer] {
        &self.destination.one_sided
    }

    /// Digest of who sends which cells. Both sides have the same one, or they do not speak of the same instances.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// What `source_rank` copies to the destination rank for a pair of blocks. Made anew: [`Templates`](crate::Templates)
    /// keeps those that are asked for more often, or for more ranks.
    ///
    /// # Errors
    ///
    /// [`TemplateError::NotASource`] if it sends nothing; [`TemplateError::TooManyPieces`] if the block sizes of the two
    /// sides fit each other too badly.
    pub fn template(&self, source_rank: u32) -> Result<Template, TemplateError> {
        let (load, source, destination) = self.between(source_rank)?;
        Template::new(load, source, destination)
    }

    /// As [`Self::template`], of some of the model's layers only. The templates of layer ranges that follow each other move,
    /// together, what the whole one does.
    ///
    /// # Errors
    ///
    /// As [`Self::template`].
    pub fn template_of_layers(&self, source_rank: u32, layers: Range<u32>) -> Result<Template, TemplateError> {
        let (load, source, destination) = self.between(source_rank)?;
        Template::new(&load.of_layers(&layers), source, destination)
    }

    /// What the template of `source_rank` is made of, and the slots of both sides that it is used with.
    pub(crate) fn between(&self, source_rank: u32) -> Result<Between<'_>, TemplateError> {
        let destination_rank = self.destination_rank;
        let sender = self.sender(source_rank).ok_or(TemplateError::NotASource { source_rank, destination_rank })?;
        Ok((&sender.load, &sender.geometry, &self.geometry))
    }

    /// A table for people: which source rank sends which layers and units of which role.
    pub fn explain(&self) -> String {
        let mut lines = BTreeMap::<_, (Vec<Layer>, u64)>::new();
        for Sender { rank, load, .. } in &self.senders {
            for part in &load.parts {
                let (layer, role): &(Layer, Role) = load.row(part);
                let line = lines.entry((*rank, role, part.plane, part.units.start, part.units.end)).or_default();
                line.0.push(*layer);
                let cells = match part.along {
                    Along::Tokens(tokens) => self.geometry.kind(part.destination.group).tokens() / tokens,
                    Along::Cells(cells) => cells,
                };
                // Bytes of one row fit, those of all pools need not.
                line.1 = line.1.saturating_add(part.cell_bytes * part.units.len() as u64 * u64::from(cells));
            }
        }
        let lines = lines.into_iter().map(|((rank, role, plane, start, end), (layers, bytes))| {
            [
                format!("{rank} -> {}", self.destination_rank),
                role.to_string(),
                plane.to_string(),
                format!("{start}..{end}"),
                layers.into_iter().collect::<LayerList>().to_string(),
                bytes.to_string(),
            ]
        });
        text::table(["ranks", "role", "plane", "units", "layers", "bytes a slot"], lines)
    }

    fn sender(&self, rank: u32) -> Option<&Sender> {
        self.senders.binary_search_by_key(&rank, |sender| sender.rank).ok().map(|index| &self.senders[index])
    }
}
