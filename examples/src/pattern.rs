//! The bytes themselves: what each word of a cell, and of everything around it, holds.
//!
//! A cell's key is mixed from everything that names the cell, and its words follow from the key, so that no two cells of
//! a run hold equal bytes except by a chance of 2^-8 a byte: a swapped layer, head, row, block or token is seen.

use kvferry_layout::Role;

/// Bytes of a word of the pattern.
const WORD_BYTES: u64 = 8;

/// Step of the word counter: 2^64 over the golden ratio, odd, as in SplitMix64.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The key of a run of words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// Key of everything that one seed decides.
    pub fn new(seed: u64) -> Self {
        Self(mix(seed ^ STEP))
    }

    /// Key of one part of what this key stands for; parts are numbered by the caller.
    ///
    /// Not commutative: `key.part(1).part(2)` and `key.part(2).part(1)` differ.
    #[must_use]
    pub fn part(self, value: u64) -> Self {
        Self(mix(self.0.wrapping_mul(STEP) ^ mix(value.wrapping_add(STEP))))
    }

    /// Key of the part that a role stands for.
    #[must_use]
    pub fn role(self, role: &Role) -> Self {
        let named = match role {
            Role::Key => return self.part(0),
            Role::Value => return self.part(1),
            Role::Latent => return self.part(2),
            Role::IndexerKey => return self.part(3),
            Role::KeyScale => return self.part(4),
            Role::ValueScale => return self.part(5),
            Role::ConvState => return self.part(6),
            Role::SsmState => return self.part(7),
            Role::Named(name) => name,
        };
        named.bytes().fold(self.part(8), |key, byte| key.part(u64::from(byte)))
    }

    /// The `index`-th word of this key.
    pub fn word(self, index: u64) -> u64 {
        mix(self.0.wrapping_add(index.wrapping_add(1).wrapping_mul(STEP)))
    }

    /// Fills `out` with the bytes `start..start + out.len()` of this key's words, little endian.
    pub fn fill(self, start: u64, out: &mut [u8]) {
        let mut index = start / WORD_BYTES;
        // Under 8, so that it is the same in any width.
        let skip = (start % WORD_BYTES) as usize;
        let mut rest = out;
        if skip > 0 {
            let word = &self.word(index).to_le_bytes()[skip..];
            let (head, tail) = rest.split_at_mut(rest.len().min(word.len()));
            head.copy_from_slice(&word[..head.len()]);
            index = index.wrapping_add(1);
            rest = tail;
        }
        let mut words = rest.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.word(index).to_le_bytes());
            index = index.wrapping_add(1);
        }
        let tail = words.into_remainder();
        tail.copy_from_slice(&self.word(index).to_le_bytes()[..tail.len()]);
    }
}

/// The finalizer of SplitMix64 (variant 13 of Stafford's): every input bit changes about half of the output bits.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A window of the pattern is the same bytes wherever the window starts and ends.
    #[test]
    fn windows_agree_with_the_whole() {
        let key = Key::new(7).part(3);
        let mut whole = [0; 64];
        key.fill(0, &mut whole);
        for start in 0..24 {
            for bytes in 0..=40 {
                let mut window = vec![0; bytes];
                key.fill(start as u64, &mut window);
                assert_eq!(window, whole[start..start + bytes], "{bytes} bytes from {start}");
            }
        }
    }

    #[test]
    fn the_words_of_a_key_are_splitmix64() {
        // The first outputs of SplitMix64 from state 0, as published with the generator.
        let key = Key(0);
        assert_eq!([key.word(0), key.word(1)], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn parts_do_not_commute_and_roles_differ() {
        let key = Key::new(0);
        assert_ne!(key.part(1).part(2), key.part(2).part(1));
        let roles = [Role::Key, Role::Value, Role::Latent, Role::Named("key".into()), Role::Named("yek".into())];
        for (index, role) in roles.iter().enumerate() {
            for other in &roles[..index] {
                assert_ne!(key.role(role), key.role(other), "{role} {other}");
            }
        }
    }
}
