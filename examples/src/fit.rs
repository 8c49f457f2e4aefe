//! Whether two instances can serve each other. That follows from their tables, so from the options, and is asked before
//! anything is filled.

use kvferry_layout::PageTable;
use kvferry_match::{MatchError, TemplateError, Templates, assign};

use crate::job::{Job, Tables};
use crate::meet::{Member, Side};

/// Why there is nothing to run. Change the options.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FitError {
    /// A rank needs what no rank of the sending instance has. The error says which.
    #[error("the instances do not match")]
    Match(#[from] MatchError),
    /// The blocks of two ranks cannot be described in terms of each other.
    #[error("between {sender} and {receiver}")]
    Template {
        /// Who would send.
        sender: Member,
        /// Who would receive.
        receiver: Member,
        /// Why.
        source: TemplateError,
    },
}

/// Makes the plans of all pairs of ranks that hold the request, or of those that `member` is one of, and throws them away:
/// what the engine would refuse once everybody has filled its pools and come.
///
/// # Errors
///
/// [`FitError`] names the first ranks that do not fit.
pub fn check(job: &Job, tables: &Tables, member: Option<Member>) -> Result<(), FitError> {
    let concerned = |rank: Member| member.is_none_or(|member| member.side != rank.side || member == rank);
    let (senders, receivers) = (job.part(Side::Sender), job.part(Side::Receiver));
    fn of<'a>(part: &'a [u32], tables: &'a [PageTable]) -> impl Iterator<Item = (u32, &'a PageTable)> {
        (0..).zip(tables).filter(|(rank, _)| part.contains(rank))
    }
    check_tables(of(&senders, &tables.senders), of(&receivers, &tables.receivers), concerned)
}

/// The same of ranks with these tables, for those pairs of which both ranks are `concerned`.
///
/// # Errors
///
/// [`FitError`] names the first ranks that do not fit.
pub fn check_tables<'a>(
    senders: impl Iterator<Item = (u32, &'a PageTable)>,
    receivers: impl Iterator<Item = (u32, &'a PageTable)>,
    concerned: impl Fn(Member) -> bool,
) -> Result<(), FitError> {
    let assignments = assign(senders, receivers)?;
    let mut templates = Templates::default();
    for assignment in &assignments {
        let receiver = Member { side: Side::Receiver, rank: assignment.destination_rank() };
        for rank in assignment.sources().filter(|_| concerned(receiver)) {
            let sender = Member { side: Side::Sender, rank };
            if concerned(sender) {
                let template = templates.template(assignment, rank);
                template.map_err(|source| FitError::Template { sender, receiver, source })?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::failure;
    use crate::options::LoopbackOptions;

    fn check_options(line: &str, member: Option<Member>) -> Result<(), String> {
        let options = LoopbackOptions::parse_from(["loopback"].into_iter().chain(line.split_whitespace()));
        let job = Job::new(&options.job).unwrap();
        check(&job, &job.tables().unwrap(), member).map_err(|error| failure::line(&error))
    }

    /// The first stage has too many rows for so many overlaps, the second has not.
    #[test]
    fn blocks_that_fit_too_badly() {
        let line = "--from pp70+8 --to pp1 --block-tokens-from 8191 --block-tokens-to 8192";
        let sender = |rank| Some(Member { side: Side::Sender, rank });
        let why = "blocks of 8191 and 8192 tokens overlap in 16382 ways";
        let expected = format!("between sender rank 0 and receiver rank 0: {why}; for ");
        for member in [None, sender(0), Some(Member { side: Side::Receiver, rank: 0 })] {
            let line = check_options(line, member).unwrap_err();
            assert!(line.starts_with(&expected), "{line}");
        }
        assert_eq!(check_options(line, sender(1)), Ok(()));
        assert_eq!(check_options("--block-tokens-from 1 --block-tokens-to 1024", None), Ok(()));
    }
}
