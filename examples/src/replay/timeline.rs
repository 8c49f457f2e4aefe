//! A replay as a picture: how fast bytes came, and a bar for each transfer of each rank.

use std::collections::BTreeMap;
use std::time::Duration;

use svg::Document;
use svg::node::element::path::Data;
use svg::node::element::{Group, Line, Path, Rectangle, Style, Text, Title};

use crate::meet::{Member, Side};
use crate::replay::record::{Leg, Record};

const WIDTH: f64 = 1280.0;
/// Where the plots begin and end.
const LEFT: f64 = 112.0;
const RIGHT: f64 = 24.0;
/// Where the first plot begins, below title and legend.
const TOP: f64 = 108.0;
const RATE_HEIGHT: f64 = 110.0;
const LANE_GAP: f64 = 10.0;
/// Height of a rank's lane at most, as far as its bars need no more.
const LANE_HEIGHT: f64 = 96.0;
const BAR_HEIGHT_MAX: f64 = 12.0;
const BAR_HEIGHT_MIN: f64 = 1.5;
/// A shorter bar would not be seen.
const BAR_WIDTH_MIN: f64 = 0.8;
const FOOT: f64 = 48.0;
const FONT: f64 = 13.0;

/// Steps of the curve of bytes a second.
const BINS: usize = 290;
/// Marks on the time axis and on that of bytes a second at most.
const TICKS_MAX: f64 = 12.0;
const RATE_TICKS_MAX: f64 = 4.0;

const STYLE: &str = "text { font-family: 'DejaVu Sans', Helvetica, Arial, sans-serif; fill: #222 } \
    .title { font-weight: bold } .soft { fill: #555 } .end { text-anchor: end } .middle { text-anchor: middle } \
    .grid { stroke: #ddd; stroke-width: 1 } .axis { stroke: #666; stroke-width: 1 } .lane { fill: #f4f4f4 } \
    .rate { fill: #009e73; fill-opacity: 0.35; stroke: #009e73; stroke-width: 1 } \
    .held-nothing { fill: #0072b2 } .held-less { fill: #56b4e9 } .held-more { fill: #e69f00 } .held-all { fill: #999 } \
    .failed { fill: #d55e00 }";

/// What a bar's colour says: how much of the prompt the decode instance held, so that it did not move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    HeldNothing,
    HeldLess,
    HeldMore,
    HeldAll,
    Failed,
}

impl Kind {
    fn of(record: &Record, leg: &Leg) -> Self {
        match (leg.parts.is_some(), record.reused) {
            (false, _) => Self::Failed,
            (true, 0) => Self::HeldNothing,
            (true, reused) if reused == record.blocks => Self::HeldAll,
            (true, reused) if reused >= record.blocks.div_ceil(2) => Self::HeldMore,
            (true, _) => Self::HeldLess,
        }
    }

    fn class(self) -> &'static str {
        match self {
            Self::HeldNothing => "held-nothing",
            Self::HeldLess => "held-less",
            Self::HeldMore => "held-more",
            Self::HeldAll => "held-all",
            Self::Failed => "failed",
        }
    }

    fn legend(self) -> &'static str {
        match self {
            Self::HeldNothing => "decode held nothing of the prompt",
            Self::HeldLess => "less than half",
            Self::HeldMore => "half or more",
            Self::HeldAll => "all of it",
            Self::Failed => "failed",
        }
    }
}

/// A transfer of one rank.
struct Bar<'a> {
    record: &'a Record,
    leg: &'a Leg,
    /// From the top of its lane.
    row: usize,
}

/// A rank's transfers, so that none is drawn over another.
struct Lane<'a> {
    member: Member,
    bars: Vec<Bar<'a>>,
    rows: usize,
}

/// From time to pixels.
struct Axis {
    seconds: f64,
}

/// The picture of a replay as an SVG document. `title` and `subtitle` say what was replayed.
pub fn draw(records: &[Record], elapsed: Duration, title: &str, subtitle: &str) -> String {
    let lanes = lanes(records);
    let axis = Axis { seconds: elapsed.as_secs_f64().max(1e-3) };
    let lanes_top = TOP + RATE_HEIGHT + 34.0;
    let bottom = lanes_top + lanes.iter().map(|lane| lane.height() + LANE_GAP).sum::<f64>() - LANE_GAP;
    let height = round(bottom.max(lanes_top) + FOOT);

    let mut document = Document::new()
        .set("viewBox", (0.0, 0.0, WIDTH, height))
        .set("width", WIDTH)
        .set("height", height)
        .add(Style::new(STYLE))
        .add(Rectangle::new().set("width", "100%").set("height", "100%").set("fill", "#fff"))
        .add(text(title, 16.0, 28.0, 17.0, "title"))
        .add(text(subtitle, 16.0, 49.0, FONT, "soft"))
        .add(legend(&lanes));
    let mut back = Group::new();
    let mut tops = Vec::new();
    let mut top = lanes_top;
    for lane in &lanes {
        let area = Rectangle::new().set("class", "lane").set("x", LEFT).set("y", round(top));
        back = back.add(area.set("width", WIDTH - RIGHT - LEFT).set("height", round(lane.height())));
        tops.push(top);
        top += lane.height() + LANE_GAP;
    }
    document = document.add(back).add(axis.draw(bottom)).add(rate(records, &axis));
    for (lane, top) in lanes.iter().zip(tops) {
        document = document.add(lane.draw(top, &axis));
    }
    document.to_string()
}

/// The name of a rank.
pub fn name(member: Member) -> String {
    match member.side {
        Side::Sender => format!("prefill {}", member.rank),
        Side::Receiver => format!("decode {}", member.rank),
    }
}

fn lanes(records: &[Record]) -> Vec<Lane<'_>> {
    let mut by_rank: BTreeMap<Member, Vec<Bar<'_>>> = BTreeMap::new();
    for record in records {
        for leg in &record.legs {
            by_rank.entry(leg.member).or_default().push(Bar { record, leg, row: 0 });
        }
    }
    by_rank.into_iter().map(|(member, bars)| Lane::new(member, bars)).collect()
}

impl<'a> Lane<'a> {
    fn new(member: Member, mut bars: Vec<Bar<'a>>) -> Self {
        bars.sort_by_key(|bar| (bar.leg.posted, bar.record.request));
        // Each in the first row whose last bar has ended.
        let mut ends: Vec<Duration> = Vec::new();
        for bar in &mut bars {
            bar.row = ends.iter().position(|end| *end <= bar.leg.posted).unwrap_or(ends.len());
            ends.resize(ends.len().max(bar.row + 1), Duration::ZERO);
            ends[bar.row] = bar.leg.ended;
        }
        Self { member, bars, rows: ends.len() }
    }

    fn row_height(&self) -> f64 {
        (LANE_HEIGHT / self.rows.max(1) as f64).clamp(BAR_HEIGHT_MIN, BAR_HEIGHT_MAX)
    }

    fn height(&self) -> f64 {
        (self.row_height() * self.rows as f64).max(3.0 * FONT)
    }

    fn draw(&self, top: f64, axis: &Axis) -> Group {
        let (name, middle) = (name(self.member), top + self.height() / 2.0);
        let bytes: u64 = self.bars.iter().map(|bar| bar.leg.bytes()).sum();
        let moved = match self.member.side {
            Side::Sender => format!("{} sent", giga(bytes)),
            Side::Receiver => format!("{} got", giga(bytes)),
        };
        let mut group = Group::new().add(text(&name, LEFT - 8.0, middle - 2.0, FONT, "end")).add(text(
            &moved,
            LEFT - 8.0,
            middle + 13.0,
            11.0,
            "end soft",
        ));
        for Bar { record, leg, row } in &self.bars {
            let (left, right) = (axis.x(leg.posted), axis.x(leg.ended));
            let what = match &leg.parts {
                Some(_) => format!("{} bytes, {} of {} blocks held", leg.bytes(), record.reused, record.blocks),
                None => "failed".to_owned(),
            };
            let (at, ms) = (leg.posted.as_secs_f64(), leg.ended.saturating_sub(leg.posted).as_secs_f64() * 1e3);
            let hover = format!("request {}: {what}, at {at:.3} s for {ms:.2} ms", record.request);
            let bar = Rectangle::new()
                .set("class", format!("bar {}", Kind::of(record, leg).class()))
                .set("x", round(left))
                .set("y", round(top + self.row_height() * *row as f64))
                .set("width", round((right - left).max(BAR_WIDTH_MIN)))
                .set("height", round(self.row_height() * 0.9));
            group = group.add(bar.add(Title::new(hover)));
        }
        group
    }
}

impl Axis {
    fn x(&self, at: Duration) -> f64 {
        LEFT + at.as_secs_f64() / self.seconds * (WIDTH - RIGHT - LEFT)
    }

    /// Lines from the first plot to `bottom`, with what they mean below.
    fn draw(&self, bottom: f64) -> Group {
        let mut group = Group::new();
        for (at, label) in ticks(self.seconds, TICKS_MAX) {
            let x = round(LEFT + at / self.seconds * (WIDTH - RIGHT - LEFT));
            let line = Line::new().set("class", "grid").set("x1", x).set("x2", x);
            group = group.add(line.set("y1", TOP).set("y2", round(bottom + 4.0)));
            group = group.add(text(&label, x, bottom + 18.0, FONT, "middle soft"));
        }
        let base = Line::new().set("class", "axis").set("x1", LEFT).set("x2", WIDTH - RIGHT);
        let label = "time since the first arrival, s";
        group.add(base.set("y1", round(bottom + 1.0)).set("y2", round(bottom + 1.0))).add(text(
            label,
            (LEFT + WIDTH - RIGHT) / 2.0,
            bottom + 38.0,
            FONT,
            "middle",
        ))
    }
}

/// What the colours mean, of those that there are.
fn legend(lanes: &[Lane<'_>]) -> Group {
    let bars = lanes.iter().flat_map(|lane| &lane.bars);
    let mut kinds: Vec<Kind> = bars.map(|bar| Kind::of(bar.record, bar.leg)).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let mut group = Group::new();
    let mut x = 16.0;
    for kind in kinds {
        let square = Rectangle::new().set("class", kind.class()).set("x", round(x)).set("y", 61.0);
        group = group.add(square.set("width", 12.0).set("height", 12.0));
        group = group.add(text(kind.legend(), x + 18.0, 72.0, FONT, ""));
        x += 44.0 + kind.legend().chars().count() as f64 * 7.4;
    }
    let how = "a bar: one request at one rank, from asking to its end";
    group.add(text(how, WIDTH - RIGHT, 72.0, FONT, "end soft"))
}

/// The curve of bytes a second that arrive at decode ranks. Those of one transfer count as evenly spread over its bar.
fn rate(records: &[Record], axis: &Axis) -> Group {
    let bin_s = axis.seconds / BINS as f64;
    let mut bins = vec![0.0; BINS];
    let legs = records.iter().flat_map(|record| &record.legs).filter(|leg| leg.member.side == Side::Receiver);
    for leg in legs.filter(|leg| leg.bytes() > 0) {
        let (start, end) = (leg.posted.as_secs_f64() / bin_s, leg.ended.as_secs_f64() / bin_s);
        let share = leg.bytes() as f64 / (end - start).max(1e-9);
        for (index, bin) in bins.iter_mut().enumerate() {
            let (from, to) = (index as f64, index as f64 + 1.0);
            *bin += (end.min(to) - start.max(from)).max(0.0) * share;
        }
    }
    let rates: Vec<f64> = bins.iter().map(|bytes| bytes / bin_s / 1e9).collect();
    let marks = ticks(rates.iter().copied().fold(1e-3, f64::max), RATE_TICKS_MAX);
    // Up to the mark above the highest.
    let step = marks.get(1).map_or(1.0, |(at, _)| *at);
    let most = marks.last().map_or(1.0, |(at, _)| at + step);
    let base = TOP + RATE_HEIGHT;
    let y = |rate: f64| round(base - rate / most * RATE_HEIGHT);

    let mut group = Group::new();
    for (at, label) in &marks {
        let line = Line::new().set("class", "grid").set("x1", LEFT).set("x2", WIDTH - RIGHT);
        group = group.add(line.set("y1", y(*at)).set("y2", y(*at)));
        group = group.add(text(label, LEFT - 8.0, y(*at) + 4.0, FONT, "end soft"));
    }
    let mut curve = Data::new().move_to((LEFT, base));
    for (index, rate) in rates.iter().enumerate() {
        let x = |index: usize| round(LEFT + index as f64 / BINS as f64 * (WIDTH - RIGHT - LEFT));
        curve = curve.line_to((x(index), y(*rate))).line_to((x(index + 1), y(*rate)));
    }
    let curve = curve.line_to((WIDTH - RIGHT, base)).close();
    group.add(Path::new().set("class", "rate").set("d", curve)).add(text(
        "bytes that decode receives, GB/s",
        LEFT,
        TOP - 7.0,
        FONT,
        "soft",
    ))
}

/// Round numbers from 0 to `most`, at most `count_max` or so of them, with their labels.
fn ticks(most: f64, count_max: f64) -> Vec<(f64, String)> {
    let least = most / count_max;
    let decade = 10f64.powf(least.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|times| times * decade).into_iter().find(|step| *step >= least);
    let step = step.unwrap_or(decade * 10.0);
    // No more digits than tell neighbours apart; steps are never below a nanosecond.
    let digits = (0..9).find(|digits| step * 10f64.powi(*digits) >= 0.999).unwrap_or(9);
    let digits = usize::try_from(digits).unwrap_or(0);
    let marks = (0..=100u32).map(|index| f64::from(index) * step).take_while(|at| *at <= most * 1.000_001);
    marks.map(|at| (at, format!("{at:.digits$}"))).collect()
}

fn giga(bytes: u64) -> String {
    let giga = bytes as f64 / 1e9;
    if giga < 0.1 { format!("{:.1} MB", giga * 1e3) } else { format!("{giga:.1} GB") }
}

fn text(content: &str, x: f64, y: f64, size: f64, class: &str) -> Text {
    let text = Text::new(content).set("x", round(x)).set("y", round(y)).set("font-size", size);
    if class.is_empty() { text } else { text.set("class", class) }
}

/// Hundredths are enough, and keep the file small.
fn round(length: f64) -> f64 {
    (length * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use svg::parser::Event;

    use super::*;
    use crate::replay::ranks::Part;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn ticks_are_round_and_not_too_many() {
        let check = |most: f64, count_max: f64, expected: &[&str]| {
            let labels: Vec<String> = ticks(most, count_max).into_iter().map(|(_, label)| label).collect();
            assert_eq!(labels, expected, "{most}");
        };
        check(67.2, 12.0, &["0", "10", "20", "30", "40", "50", "60"]);
        check(10.0, 12.0, &["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10"]);
        check(0.3, 4.0, &["0.0", "0.1", "0.2", "0.3"]);
        check(0.0041, 4.0, &["0.000", "0.002", "0.004"]);
        check(669.0, 12.0, &["0", "100", "200", "300", "400", "500", "600"]);
    }

    fn leg(side: Side, rank: u32, posted: u32, ended: u32, bytes: Option<u64>) -> Leg {
        let parts = bytes.map(|bytes| vec![Part { bytes, elapsed: MS, carried: Vec::new() }]);
        Leg { member: Member { side, rank }, posted: posted * MS, ended: ended * MS, parts, checked_bytes: 0 }
    }

    /// What an SVG reader finds: tags that open and close in turn, a bar for each transfer, inside the picture, and none
    /// over another of its rank.
    #[test]
    fn each_transfer_has_a_bar_of_its_own() {
        let record = |request: usize, reused: usize, legs: Vec<Leg>| Record {
            request,
            arrived: Duration::ZERO,
            begun: Duration::ZERO,
            blocks: 4,
            reused,
            saved_bytes: 0,
            legs,
        };
        let both = |posted: u32, ended: u32, bytes: Option<u64>| {
            vec![leg(Side::Sender, 0, posted, ended, bytes), leg(Side::Receiver, 0, posted, ended, bytes)]
        };
        let records = [
            record(0, 0, both(0, 40, Some(1 << 30))),
            record(1, 2, both(10, 30, Some(1 << 20))),
            record(2, 4, both(30, 31, Some(0))),
            record(3, 0, both(50, 100, None)),
        ];
        let picture = draw(&records, 100 * MS, "4 requests <of> a & b", "scaled");
        let (mut open, mut bars) = (Vec::new(), Vec::new());
        for event in svg::read(&picture).unwrap() {
            match event {
                Event::Tag(name, svg::node::element::tag::Type::Start, attributes) => {
                    open.push(name.to_owned());
                    if let Some(class) = attributes.get("class").filter(|class| class.starts_with("bar ")) {
                        let number = |name: &str| attributes.get(name).unwrap().parse::<f64>().unwrap();
                        bars.push((class.to_string(), number("x"), number("y"), number("width"), number("height")));
                    }
                }
                Event::Tag(name, svg::node::element::tag::Type::End, _) => {
                    assert_eq!(open.pop().as_deref(), Some(name))
                }
                Event::Error(error) => panic!("{error}"),
                _ => {}
            }
        }
        assert_eq!(open, Vec::<String>::new());
        let classes: Vec<&str> = bars.iter().map(|(class, ..)| class.as_str()).collect();
        assert_eq!(classes, ["bar held-nothing", "bar held-more", "bar held-all", "bar failed"].repeat(2));
        let lanes = bars.chunks(4);
        for lane in lanes {
            for (index, (_, x, y, width, height)) in lane.iter().enumerate() {
                assert!(*x >= LEFT && x + width <= WIDTH - RIGHT + 0.1, "{x} {width}");
                for (_, other_x, other_y, ..) in &lane[..index] {
                    assert!(y != other_y || x > other_x, "{y}");
                    assert!(height > &0.0);
                }
            }
            assert_ne!(lane[0].2, lane[1].2, "they overlap in time");
        }
        assert!(picture.contains("4 requests &lt;of&gt; a &amp; b"), "{picture}");
    }
}
