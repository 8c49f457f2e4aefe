//! How one rank's process tells what it does: to a person, or to a program that reads JSON lines.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use crate::event::{Event, Phase};
use crate::failure::Failure;
use crate::meet::Member;
use crate::progress::Bars;
use crate::show::Summary;

/// Progress lines of one phase come no faster than this.
const LINE_INTERVAL: Duration = Duration::from_millis(50);

/// One rank's way to tell.
#[derive(Debug)]
pub struct Voice {
    member: Member,
    summary: Summary,
    form: Form,
}

#[derive(Debug)]
enum Form {
    Text(Bars),
    Lines(Option<(Phase, Instant)>),
}

impl Voice {
    /// Tells `member`'s doings as JSON lines, or as progress bars and a table.
    pub fn new(member: Member, json: bool) -> Self {
        let form = if json { Form::Lines(None) } else { Form::Text(Bars::new()) };
        Self { member, summary: Summary::default(), form }
    }

    /// A phase is `done_bytes` far, of `total_bytes` if that is known.
    pub fn progress(&mut self, phase: Phase, done_bytes: u64, total_bytes: Option<u64>) {
        match &mut self.form {
            Form::Text(bars) => bars.update(self.member, phase, done_bytes, total_bytes),
            Form::Lines(last) => {
                let due = last.is_none_or(|(of, at)| of != phase || at.elapsed() >= LINE_INTERVAL);
                if due || Some(done_bytes) == total_bytes {
                    *last = Some((phase, Instant::now()));
                    print_line(&Event::Progress { phase, done_bytes, total_bytes });
                }
            }
        }
    }

    /// Something is done.
    pub fn say(&mut self, event: Event) {
        match &self.form {
            Form::Lines(_) => print_line(&event),
            Form::Text(_) => self.summary.add(self.member, event),
        }
    }

    /// All is done, or has failed.
    pub fn end(mut self, outcome: &Result<(), Failure>) {
        match (&mut self.form, outcome) {
            (Form::Lines(_), Err(failure)) => {
                let (message, exit_code) = (failure.line().to_owned(), failure.exit_code());
                print_line(&Event::Error { message, exit_code, culprit: failure.culprit() });
            }
            (Form::Text(bars), Ok(())) => {
                bars.clear();
                print(&self.summary.text());
            }
            _ => {}
        }
    }
}

/// Prints a text and a line end at once.
///
/// A reader that went away is no reason to stop: this process ends when its work or its parent does.
pub fn print(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(format!("{text}\n").as_bytes()).and_then(|()| out.flush());
}

fn print_line(event: &Event) {
    // Events are plain structs of numbers and texts, which always have a JSON form.
    if let Ok(line) = serde_json::to_string(event) {
        print(&line);
    }
}
