//! The cards of all ranks of one instance, as one value that has been checked.

use std::collections::{BTreeMap, BTreeSet};

use crate::card::{self, Card};
use crate::error::{CardError, InstanceCardError};

/// What the card of an instance begins with.
const MAGIC: [u8; 8] = *b"kvferry+";

/// All ranks of one instance, or of one data-parallel part of it: what the ranks of both instances need to
/// [`connect`](crate::Engine::connect). Made once of the cards of the ranks, it travels as opaque, versioned bytes.
///
/// ```no_run
/// # use kvferry::InstanceCard;
/// # fn of_ranks() -> Vec<Vec<u8>> { Vec::new() }
/// // Whoever has collected the cards of the four ranks.
/// let bytes = InstanceCard::new(0..4, of_ranks())?.to_bytes();
/// // Whoever is told of the instance.
/// let instance = InstanceCard::from_bytes(&bytes)?;
/// assert!(instance.ranks().eq(0..4));
/// # Ok::<(), kvferry::InstanceCardError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct InstanceCard {
    /// By rank, ascending: each rank once, each with an epoch of its own, all with one name of the instance.
    cards: Vec<Card>,
}

impl InstanceCard {
    /// Parses and checks the cards of `ranks`, which may come in any order.
    ///
    /// # Errors
    ///
    /// [`InstanceCardError`] names the card or rank: one that cannot be read, is missing, is there twice, or belongs elsewhere.
    pub fn new<C: AsRef<[u8]>>(
        ranks: impl IntoIterator<Item = u32>,
        cards: impl IntoIterator<Item = C>,
    ) -> Result<Self, InstanceCardError> {
        let ranks: BTreeSet<u32> = ranks.into_iter().collect();
        let cards = parse(cards)?;
        if let Some(rank) = cards.keys().copied().find(|rank| !ranks.contains(rank)) {
            return Err(InstanceCardError::Unexpected { rank });
        }
        if let Some(rank) = ranks.into_iter().find(|rank| !cards.contains_key(rank)) {
            return Err(InstanceCardError::Missing { rank });
        }
        Ok(Self { cards: cards.into_values().collect() })
    }

    /// Parses and checks what [`to_bytes`](Self::to_bytes) has made.
    ///
    /// # Errors
    ///
    /// [`InstanceCardError`]; any bytes give one or a card that holds.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, InstanceCardError> {
        let contents = card::open(MAGIC, bytes)?;
        let Ok((cards, [])) = postcard::take_from_bytes::<Vec<&[u8]>>(contents) else {
            return Err(CardError::Undecodable.into());
        };
        Ok(Self { cards: parse(cards)?.into_values().collect() })
    }

    /// The card as bytes, to be handed to the ranks of both instances.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let cards: Vec<Vec<u8>> = self.cards.iter().map(Card::encode).collect();
        card::seal(MAGIC, &cards)
    }

    /// The ranks, ascending.
    pub fn ranks(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.cards.iter().map(|card| card.rank)
    }

    pub(crate) fn cards(&self) -> &[Card] {
        &self.cards
    }
}

/// Parses cards of ranks of one instance, in any order.
fn parse<C: AsRef<[u8]>>(cards: impl IntoIterator<Item = C>) -> Result<BTreeMap<u32, Card>, InstanceCardError> {
    let (mut parsed, mut epochs) = (BTreeMap::<u32, Card>::new(), BTreeSet::new());
    for (place, bytes) in cards.into_iter().enumerate() {
        let refused = |source| InstanceCardError::Card { place, source };
        let card = Card::parse(bytes.as_ref()).map_err(refused)?;
        let rank = card.rank;
        if parsed.contains_key(&rank) {
            return Err(InstanceCardError::Twice { rank });
        }
        if let Some((_, other)) = parsed.first_key_value().filter(|(_, other)| other.instance != card.instance) {
            return Err(InstanceCardError::OtherInstance {
                rank,
                theirs: card.instance,
                others: other.instance.clone(),
            });
        }
        // No process is two ranks: the card of one was made into that of another.
        if !epochs.insert(card.epoch) {
            return Err(refused(CardError::Damaged));
        }
        parsed.insert(rank, card);
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_refused_and_none_is_a_panic(bytes: Vec<u8>) {
            prop_assert!(InstanceCard::from_bytes(&bytes).is_err());
            // Undamaged, and nonsense all the same: as a list of cards, and as a card.
            let _ = InstanceCard::from_bytes(&card::seal(MAGIC, &bytes));
            let of_one = InstanceCard::from_bytes(&card::seal(MAGIC, &vec![bytes]));
            prop_assert!(matches!(of_one, Err(InstanceCardError::Card { place: 0, .. })), "{of_one:?}");
        }
    }
}
