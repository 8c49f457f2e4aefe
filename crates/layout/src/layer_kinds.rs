//! What each layer of a model is, from whatever keys of its config say so.

use serde_json::Value;

use crate::config::{Config, ConfigError};
use crate::mask::LayerMask;
use crate::table::Layer;

/// What a layer keeps of the tokens it has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerKind {
    /// All of them.
    Full,
    /// Those inside a window.
    Window,
    /// State of one size, however many they were.
    Recurrent,
    /// Nothing.
    Nothing,
}

/// What one key says of every hidden layer.
pub(crate) struct Source {
    key: &'static str,
    kinds: Vec<LayerKind>,
}

impl Source {
    /// From a rule that `key` is the parameter of.
    pub(crate) fn rule(key: &'static str, hidden_layers: u32, kind: impl Fn(u32) -> LayerKind) -> Self {
        Self { key, kinds: (0..hidden_layers).map(kind).collect() }
    }

    /// From a list with one word a layer, if the key is there.
    pub(crate) fn list(
        config: &Config,
        key: &'static str,
        words: &'static [(&'static str, LayerKind)],
    ) -> Result<Option<Self>, ConfigError> {
        let Some(entries) = config.optional_list(key)? else {
            return Ok(None);
        };
        let kind = |(layer, entry): (Layer, &Value)| {
            let word = words.iter().find(|(word, _)| entry.as_str() == Some(word));
            word.map(|(_, kind)| *kind).ok_or_else(|| ConfigError::LayerType {
                key,
                layer,
                found: entry.to_string(),
                known: words.iter().map(|(word, _)| *word).collect(),
            })
        };
        let kinds = (0..).map(Layer).zip(entries).map(kind).collect::<Result<_, _>>()?;
        Ok(Some(Self { key, kinds }))
    }

    /// From a string with one letter a layer, if the key is there.
    pub(crate) fn letters(
        config: &Config,
        key: &'static str,
        letters: &'static [(&'static str, LayerKind)],
    ) -> Result<Option<Self>, ConfigError> {
        let Some(value) = config.value(key) else {
            return Ok(None);
        };
        let text = value.as_str().ok_or(ConfigError::WrongType { key, expected: "a string" })?;
        let kind = |(layer, found): (Layer, char)| {
            let letter = letters.iter().find(|(letter, _)| letter.chars().eq([found]));
            letter.map(|(_, kind)| *kind).ok_or_else(|| ConfigError::LayerType {
                key,
                layer,
                found: found.to_string(),
                known: letters.iter().map(|(letter, _)| *letter).collect(),
            })
        };
        let kinds = (0..).map(Layer).zip(text.chars()).map(kind).collect::<Result<_, _>>()?;
        Ok(Some(Self { key, kinds }))
    }

    /// Layers that it speaks of.
    pub(crate) fn len(&self) -> usize {
        self.kinds.len()
    }
}

/// What the layers are, where all sources that are there must say the same, and of as many layers as there are.
pub(crate) fn agreed(
    hidden_layers: u32,
    sources: impl IntoIterator<Item = Source>,
) -> Result<Option<Vec<LayerKind>>, ConfigError> {
    let mut first: Option<Source> = None;
    for source in sources {
        let Source { key, ref kinds } = source;
        if kinds.len() != hidden_layers as usize {
            return Err(ConfigError::MaskLength { key, entries: kinds.len(), hidden_layers });
        }
        let Some(first) = &first else {
            first = Some(source);
            continue;
        };
        let pairs = (0..).map(Layer).zip(first.kinds.iter().zip(kinds));
        if let Some((layer, _)) = { pairs }.find(|(_, (first, other))| first != other) {
            return Err(ConfigError::LayerConflict { layer, first_key: first.key, second_key: key });
        }
    }
    Ok(first.map(|source| source.kinds))
}

/// The layers of one kind.
pub(crate) fn layers_of(kinds: &[LayerKind], kind: LayerKind) -> LayerMask {
    LayerMask::from_bools(kinds.iter().map(|found| *found == kind))
}
