//! Request traces: JSON lines with `timestamp`, `input_length`, `output_length` and `hash_ids`.

use std::collections::HashSet;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::files::open_regular;

/// Tokens of a block that a hash id stands for.
pub const BLOCK_TOKENS: u64 = 512;

/// Bytes of a line at most: a million tokens are 2,000 ids.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// Tokens of a request at most.
const TOKENS_MAX: u64 = 1 << 28;

/// Requests of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// In the order of their arrival.
    pub requests: Vec<Request>,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// When it arrives, from the start of the trace.
    pub arrival: Duration,
    /// Tokens of its prompt.
    pub input_tokens: u64,
    /// Tokens that were generated.
    pub output_tokens: u64,
    /// Its prompt's blocks, in order.
    pub blocks: Vec<Block>,
}

/// A block of a prompt. Equal blocks hold the same cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// The trace's name for it.
    pub id: u64,
    /// Its place in the prompt. A cache depends on it, so the same name elsewhere would be another block.
    pub ordinal: u64,
    /// Tokens of it: [`BLOCK_TOKENS`], or fewer at the end of a prompt.
    pub tokens: u64,
}

/// Why a file is no trace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line is no request. Mend it, or take another file.
    #[error("{} line {line}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What is wrong with it.
        source: LineError,
    },
    /// There is no request in the file.
    #[error("{} has no requests", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// What is wrong with a line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineError {
    /// It is no JSON object with the four fields.
    #[error("not a request")]
    Json(#[from] serde_json::Error),
    /// No request has so long a line.
    #[error("longer than {LINE_BYTES_MAX} bytes")]
    TooLong,
    /// Nothing, or too much, to move.
    #[error("{field} {tokens} is not in {min}..={TOKENS_MAX}")]
    Tokens {
        /// The field.
        field: &'static str,
        /// Its value.
        tokens: u64,
        /// Its least value.
        min: u64,
    },
    /// There must be one hash id for every 512 tokens of the prompt, the last of which may be fewer.
    #[error("input_length {input_tokens} is {expected} blocks of {BLOCK_TOKENS} tokens, hash_ids has {found}")]
    Blocks {
        /// `input_length`.
        input_tokens: u64,
        /// Blocks of so many tokens.
        expected: u64,
        /// Entries of `hash_ids`.
        found: usize,
    },
    /// A block is in one place of a prompt only: its cache depends on everything in front of it.
    #[error("hash_ids names {id} twice")]
    Twice {
        /// The id.
        id: u64,
    },
    /// Requests must be in the order of their arrival.
    #[error("timestamp {timestamp_ms} is before that of the request in front of it, {before_ms}")]
    Earlier {
        /// `timestamp`.
        timestamp_ms: u64,
        /// `timestamp` of the request in front of it.
        before_ms: u64,
    },
}

/// A line as it is written. Other fields are ignored.
#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

impl Trace {
    /// Reads the first `requests_max` requests of a file. Empty lines are none.
    ///
    /// # Errors
    ///
    /// [`TraceError`] names the line and what is wrong with it.
    pub fn read(path: &Path, requests_max: usize) -> Result<Self, TraceError> {
        let failed = |source| TraceError::Read { path: path.to_owned(), source };
        let file = open_regular(path).map_err(failed)?;
        Self::parse(BufReader::new(file), path, requests_max)
    }

    fn parse(mut file: impl BufRead, path: &Path, requests_max: usize) -> Result<Self, TraceError> {
        let mut requests: Vec<Request> = Vec::new();
        let mut text = Vec::new();
        let mut line = 0;
        while requests.len() < requests_max {
            text.clear();
            let read = file.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut text);
            if read.map_err(|source| TraceError::Read { path: path.to_owned(), source })? == 0 {
                break;
            }
            line += 1;
            if text.trim_ascii().is_empty() {
                continue;
            }
            let before = requests.last().map(|request| request.arrival);
            let request = Request::parse(&text, before);
            requests.push(request.map_err(|source| TraceError::Line { path: path.to_owned(), line, source })?);
        }
        if requests.is_empty() { Err(TraceError::Empty { path: path.to_owned() }) } else { Ok(Self { requests }) }
    }

    /// Time from the first arrival to the last.
    pub fn span(&self) -> Duration {
        match self.requests.as_slice() {
            [first, .., last] => last.arrival - first.arrival,
            _ => Duration::ZERO,
        }
    }

    /// Blocks of all prompts, and how many of them an earlier request has named already: what reuse could save at most.
    pub fn blocks(&self) -> (u64, u64) {
        let mut seen = HashSet::new();
        let all = self.requests.iter().flat_map(|request| &request.blocks);
        all.fold((0, 0), |(blocks, again), block| (blocks + 1, again + u64::from(!seen.insert(*block))))
    }
}

impl Request {
    fn parse(text: &[u8], before: Option<Duration>) -> Result<Self, LineError> {
        if text.len() as u64 > LINE_BYTES_MAX {
            return Err(LineError::TooLong);
        }
        let Line { timestamp, input_length, output_length, hash_ids } = serde_json::from_slice(text.trim_ascii_end())?;
        let arrival = Duration::from_millis(timestamp);
        if let Some(before) = before.filter(|before| arrival < *before) {
            // It was a `u64` of milliseconds.
            let before_ms = u64::try_from(before.as_millis()).unwrap_or(u64::MAX);
            return Err(LineError::Earlier { timestamp_ms: timestamp, before_ms });
        }
        let bounds = [("input_length", input_length, 1), ("output_length", output_length, 0)];
        if let Some((field, tokens, min)) =
            bounds.into_iter().find(|(_, tokens, min)| !(*min..=TOKENS_MAX).contains(tokens))
        {
            return Err(LineError::Tokens { field, tokens, min });
        }
        let expected = input_length.div_ceil(BLOCK_TOKENS);
        if hash_ids.len() as u64 != expected {
            return Err(LineError::Blocks { input_tokens: input_length, expected, found: hash_ids.len() });
        }
        let mut seen = HashSet::with_capacity(hash_ids.len());
        if let Some(&id) = hash_ids.iter().find(|id| !seen.insert(**id)) {
            return Err(LineError::Twice { id });
        }
        Ok(Self::new(arrival, input_length, output_length, &hash_ids))
    }

    /// A request whose ids are as many as its tokens need.
    pub fn new(arrival: Duration, input_tokens: u64, output_tokens: u64, ids: &[u64]) -> Self {
        let blocks = ids.iter().zip(0..).map(|(id, ordinal)| Block {
            id: *id,
            ordinal,
            tokens: input_tokens.saturating_sub(ordinal.saturating_mul(BLOCK_TOKENS)).min(BLOCK_TOKENS),
        });
        Self { arrival, input_tokens, output_tokens, blocks: blocks.collect() }
    }

    /// Blocks that the generated tokens need behind those of the prompt.
    pub fn output_blocks(&self) -> u64 {
        (self.input_tokens + self.output_tokens).div_ceil(BLOCK_TOKENS) - self.blocks.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure;

    const FIRST: &str = r#"{"timestamp": 5, "input_length": 600, "output_length": 423, "hash_ids": [7, 9]}"#;
    const SECOND: &str =
        r#"{"timestamp": 5, "input_length": 512, "output_length": 0, "hash_ids": [7], "more": "ignored"}"#;

    fn parse(text: &str, requests_max: usize) -> Result<Trace, String> {
        Trace::parse(text.as_bytes(), Path::new("t.jsonl"), requests_max).map_err(|error| failure::line(&error))
    }

    #[test]
    fn requests_are_read_in_order() {
        let trace = parse(&format!("{FIRST}\n\n{SECOND}"), usize::MAX).unwrap();
        let blocks = |request: usize| {
            trace.requests[request].blocks.iter().map(|block| (block.id, block.tokens)).collect::<Vec<_>>()
        };
        assert_eq!((blocks(0), blocks(1)), (vec![(7, 512), (9, 88)], vec![(7, 512)]));
        // 1,023 tokens take two blocks, 512 one.
        assert_eq!([0, 1].map(|request: usize| trace.requests[request].output_blocks()), [0, 0]);
        assert_eq!(Request::new(Duration::ZERO, 600, 425, &[7, 9]).output_blocks(), 1);
        assert_eq!((trace.span(), trace.blocks()), (Duration::ZERO, (3, 1)));
        assert_eq!(parse(&format!("{FIRST}\nnothing"), 1).unwrap().requests.len(), 1);
    }

    #[test]
    fn bad_lines_are_named() {
        let line = |timestamp: u64, input: u64, output: u64, ids: &str| {
            format!(r#"{{"timestamp":{timestamp},"input_length":{input},"output_length":{output},"hash_ids":[{ids}]}}"#)
        };
        for (second, expected) in [
            ("{", "not a request: EOF while parsing an object at line 1 column 1"),
            ("{}", "not a request: missing field `timestamp` at line 1 column 2"),
            (&line(5, 1, 1, "-1"), "not a request: invalid value: integer `-1`, expected u64 at line 1 column 64"),
            ("\u{fffd}", "not a request: expected value at line 1 column 1"),
            (&line(4, 1, 1, "1"), "timestamp 4 is before that of the request in front of it, 5"),
            (&line(5, 0, 1, ""), "input_length 0 is not in 1..=268435456"),
            (&line(5, 1, 1 << 29, "1"), "output_length 536870912 is not in 0..=268435456"),
            (&line(5, 513, 1, "1"), "input_length 513 is 2 blocks of 512 tokens, hash_ids has 1"),
            (&line(5, 512, 1, "1,2"), "input_length 512 is 1 blocks of 512 tokens, hash_ids has 2"),
            (&line(5, 1025, 1, "1,2,1"), "hash_ids names 1 twice"),
            (&" ".repeat(1 << 21).replacen(' ', "x", 1), "longer than 1048576 bytes"),
        ] {
            let error = parse(&format!("{FIRST}\n{second}\n{FIRST}"), usize::MAX).unwrap_err();
            let found = error.strip_prefix("t.jsonl line 2: ").unwrap_or_else(|| panic!("{error}"));
            assert_eq!(found, expected);
        }
        assert_eq!(parse("\n", usize::MAX), Err("t.jsonl has no requests".to_owned()));
    }
}
