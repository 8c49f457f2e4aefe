//! How a program ends when it cannot do its job: one line on standard error, and an exit code that says whose fault it is.

use std::error::Error;
use std::io;
use std::process::ExitCode;

use crate::meet::Member;

/// Characters of the line at most.
const LINE_CHARS_MAX: usize = 2000;

/// Why a program ends early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// What it was asked for makes no sense. Exit code 2.
    Usage(String),
    /// It did not work out. Exit code 1.
    Failed(String),
    /// It did not work out because another rank failed first. Exit code 1.
    Missed {
        /// The line.
        line: String,
        /// The other rank.
        culprit: Member,
    },
}

/// The operating system refuses what every program needs. Look at its limits, and at how the program was started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SystemError {
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// This program's own path is not to be had, and the others lie beside it.
    #[error("cannot tell where this program is")]
    OwnPath(#[source] io::Error),
    /// Nobody takes the output.
    #[error("cannot write to standard output")]
    Output(#[source] io::Error),
}

impl Failure {
    /// What was asked for makes no sense.
    pub fn usage(error: impl Into<Box<dyn Error>>) -> Self {
        Self::Usage(line(&*error.into()))
    }

    /// It did not work out.
    pub fn failed(error: impl Into<Box<dyn Error>>) -> Self {
        Self::Failed(line(&*error.into()))
    }

    /// It did not work out, because of `culprit` if there is one.
    pub fn caused_by(culprit: Option<Member>, error: impl Into<Box<dyn Error>>) -> Self {
        let line = line(&*error.into());
        match culprit {
            Some(culprit) => Self::Missed { line, culprit },
            None => Self::Failed(line),
        }
    }

    /// The one line.
    pub fn line(&self) -> &str {
        match self {
            Self::Usage(line) | Self::Failed(line) | Self::Missed { line, .. } => line,
        }
    }

    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failed(_) | Self::Missed { .. } => 1,
        }
    }

    /// The rank that failed before, if that is why.
    pub fn culprit(&self) -> Option<Member> {
        match self {
            Self::Usage(_) | Self::Failed(_) => None,
            Self::Missed { culprit, .. } => Some(*culprit),
        }
    }
}

/// An error and its sources on one line. Control characters, which a peer may have chosen, become spaces.
pub fn line(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    one_line(&text)
}

/// A text on one line of bounded length.
pub fn one_line(text: &str) -> String {
    let printable = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c });
    printable.take(LINE_CHARS_MAX).collect()
}

/// Ends a program: silently if all is well, else with one line on standard error.
pub fn exit(program: &str, outcome: &Result<(), Failure>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{program}: {}", failure.line());
            ExitCode::from(failure.exit_code())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn sources_follow_on_the_same_line() {
        let failure = Failure::failed(Outer(std::io::Error::other("inner\nsecond \x1b[31mline")));
        assert_eq!(failure.line(), "outer: inner second  [31mline");
        assert_eq!(failure.exit_code(), 1);
    }
}
