//! Cuts and their texts.

use std::collections::BTreeSet;

use kvferry_layout::{Coordinates, Cut, CutError, LAYERS_MAX, Layer, Ordinals, RANKS_MAX};
use proptest::prelude::*;

fn layers(ids: impl IntoIterator<Item = u32>) -> Vec<Layer> {
    ids.into_iter().map(Layer).collect()
}

/// Lists that hold each of some layers once, dealt out at random.
fn lists() -> impl Strategy<Value = Vec<Vec<Layer>>> {
    prop::collection::vec(0..4usize, 4..40).prop_map(|mut stages| {
        // Every stage has a layer, the last one too.
        (0..4).for_each(|stage| stages[stage] = stage);
        (0..4).map(|stage| layers((0..).zip(&stages).filter(|(_, of)| **of == stage).map(|(layer, _)| layer))).collect()
    })
}

fn cuts() -> impl Strategy<Value = Cut> {
    let even = (1..20u32, 1..20u32).prop_map(|(pp, tp)| Cut::new(pp, tp).unwrap());
    let counts = (prop::collection::vec(1..50u32, 2..20), 1..20u32);
    let counts = counts.prop_map(|(counts, tp)| Cut::with_layer_counts(counts, tp).unwrap());
    let lists = (lists(), 1..20u32).prop_map(|(lists, tp)| Cut::with_layer_lists(&lists, tp).unwrap());
    let degree = || prop_oneof![Just(1u32), 1..8u32];
    (prop_oneof![even, counts, lists], degree(), degree())
        .prop_map(|(cut, dp, cp)| cut.with_dp(dp).unwrap().with_cp(cp).unwrap())
}

#[test]
fn texts() {
    let check = |text: &str, canonical: &str, sizes: [u32; 4]| {
        let cut: Cut = text.parse().unwrap();
        assert_eq!(cut.to_string(), canonical);
        assert_eq!([cut.pp_size(), cut.dp_size(), cut.cp_size(), cut.tp_size()], sizes, "{text}");
    };
    check("pp4tp2", "pp4tp2", [4, 1, 1, 2]);
    check("tp8", "tp8", [1, 1, 1, 8]);
    check("pp2", "pp2", [2, 1, 1, 1]);
    check("dp4tp1", "dp4", [1, 4, 1, 1]);
    check("cp2", "cp2", [1, 1, 2, 1]);
    check("pp4dp3cp2tp5", "pp4dp3cp2tp5", [4, 3, 2, 5]);
    check("pp40+38tp2", "pp40+38tp2", [2, 1, 1, 2]);
    check("pp40+38", "pp40+38", [2, 1, 1, 1]);
    check("pp0..4+4..8cp2", "pp0..4+4..8cp2", [2, 1, 2, 1]);
    check("pp0..2,6..8+2..6", "pp0..2,6..8+2..6", [2, 1, 1, 1]);
    // Ranges come in order, and those that touch are one.
    check("pp3..4,0..2,2..3+4..5,6..7", "pp0..4+4..5,6..7", [2, 1, 1, 1]);
    check("pp1dp1cp1tp1", "tp1", [1, 1, 1, 1]);
    check("pp01tp08", "tp8", [1, 1, 1, 8]);
}

#[test]
fn bad_texts() {
    for text in [
        "",
        "pp",
        "tp",
        "dp",
        "cp",
        "4",
        "pp4 tp2",
        "PP4",
        "tp2pp4",
        "cp2dp2",
        "tp2dp2",
        "pp-1",
        "pp+4",
        "pp4+",
        "tp+8",
        "tp8tp8",
        "pp2x",
        "xpp2",
        "dp2+2",
        "cp0..2",
        "pp0..4",
        "pp0..4+",
        "pp0..4+5",
        "pp0..4,+4..8",
        "pp0...4+4..8",
        "pp..4+4..8",
        "pp0..+4..8",
    ] {
        let error = text.parse::<Cut>().unwrap_err();
        let one_stage = CutError::TooFewStages { stages: 1 };
        let expected = if text == "pp0..4" { one_stage } else { CutError::Syntax { text: text.to_owned() } };
        assert_eq!(error, expected, "{text}");
    }
    for text in ["pp0tp2", "tp0", "dp0", "pp2cp0", "pp40+0", "pp0..0+0..4", "pp4..2+0..4"] {
        assert_eq!(text.parse::<Cut>(), Err(CutError::Zero), "{text}");
    }
    let too_many = Err(CutError::TooManyRanks { ranks_max: RANKS_MAX });
    for text in ["pp4294967295tp4294967295", "pp256tp257", "pp64dp64cp64", "dp65536tp2", "pp99999999999"] {
        assert_eq!(text.parse::<Cut>(), too_many, "{text}");
    }
    let too_high = "pp0..4+4..99999999999".parse::<Cut>().unwrap_err();
    assert!(matches!(too_high, CutError::LayerTooHigh { .. }), "{too_high}");
    assert_eq!("pp16dp16cp16tp16".parse::<Cut>().map(|cut| cut.rank_count()), Ok(RANKS_MAX));
    assert_eq!(Cut::with_layer_counts(vec![78], 2), Err(CutError::TooFewStages { stages: 1 }));
    assert_eq!(Cut::with_layer_lists(&[layers(0..4)], 2), Err(CutError::TooFewStages { stages: 1 }));
    let message = "cut \"pp\" is not of the form pp4, tp8, pp4dp2cp2tp2, pp40+38tp2 or pp0..40,76..78+40..76";
    assert_eq!("pp".parse::<Cut>().unwrap_err().to_string(), message);
}

#[test]
fn layers_listed_wrongly() {
    let lists = |lists: &[&[u32]]| {
        let lists: Vec<_> = lists.iter().map(|list| layers(list.iter().copied())).collect();
        Cut::with_layer_lists(&lists, 1)
    };
    assert_eq!(lists(&[&[0, 1], &[2, 3, 1]]), Err(CutError::LayerTwice { layer: Layer(1) }));
    assert_eq!(lists(&[&[0, 1, 0], &[2]]), Err(CutError::LayerTwice { layer: Layer(0) }));
    assert_eq!(lists(&[&[0], &[]]), Err(CutError::Zero));
    let too_high = |layer| Err(CutError::LayerTooHigh { layer: Layer(layer), layers_max: LAYERS_MAX });
    assert_eq!(lists(&[&[0], &[LAYERS_MAX]]), too_high(LAYERS_MAX));
    assert!(lists(&[&[0], &[u32::MAX]]).is_err());
    assert_eq!("pp0..4+4..70000".parse::<Cut>(), too_high(69_999));
    assert_eq!("pp0..4+2..8".parse::<Cut>().unwrap_err().to_string(), "layer 2 is listed twice in the pp stages");

    let stage = |text: &str, hidden_layers| text.parse::<Cut>().unwrap().stage_layers(0, hidden_layers);
    let missing = |layer, hidden_layers| Err(CutError::LayerMissing { layer: Layer(layer), hidden_layers });
    let past = |layer, hidden_layers| Err(CutError::LayerPastModel { layer: Layer(layer), hidden_layers });
    assert_eq!(stage("pp0..4+4..8", 8), Ok(layers(0..4)));
    assert_eq!(stage("pp0..4+4..8", 9), missing(8, 9));
    assert_eq!(stage("pp0..4+5..8", 8), missing(4, 8));
    assert_eq!(stage("pp1..4+4..8", 8), missing(0, 8));
    assert_eq!(stage("pp0..4+4..8", 7), past(7, 7));
    assert_eq!(stage("pp0..4+4..8", 2), past(2, 2));
    assert_eq!(stage("pp0..4+6..8", 4), past(6, 4));
}

#[test]
fn stages_that_do_not_fit_the_model() {
    let stage = |text: &str, hidden_layers| text.parse::<Cut>().unwrap().stage_layers(0, hidden_layers);
    assert_eq!(stage("pp40+37", 78).unwrap_err().to_string(), "pp stages cover 77 of 78 layers");
    assert_eq!(stage("pp40+39", 78), Err(CutError::Coverage { covered: 79, hidden_layers: 78 }));
    assert_eq!(
        stage("pp4294967295+4294967295", 78),
        Err(CutError::Coverage { covered: 8_589_934_590, hidden_layers: 78 })
    );
    assert_eq!(stage("pp5", 4), Err(CutError::MoreStagesThanLayers { stages: 5, hidden_layers: 4 }));
}

#[test]
fn the_last_axis_counts_fastest() {
    let cut: Cut = "pp2dp2cp2tp3".parse().unwrap();
    let mut rank = 0;
    for pp_rank in 0..2 {
        for dp_rank in 0..2 {
            for cp_rank in 0..2 {
                for tp_rank in 0..3 {
                    assert_eq!(cut.coordinates(rank), Ok(Coordinates { pp_rank, dp_rank, cp_rank, tp_rank }));
                    rank += 1;
                }
            }
        }
    }
    assert_eq!(rank, cut.rank_count());
    let error = cut.coordinates(24).unwrap_err();
    assert_eq!(error.to_string(), "rank 24 is not one of the 24 of pp2dp2cp2tp3");
    let ranks: Vec<u32> = cut.ranks_of(1).collect();
    assert_eq!(ranks, [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23]);
    assert_eq!(cut.ranks_of(2).count(), 0);
}

#[test]
fn blocks_are_dealt_out() {
    let cut: Cut = "cp3tp2".parse().unwrap();
    let holders = |ordinal| (0..3).filter(|cp_rank| cut.ordinals(*cp_rank).holds(ordinal)).collect::<Vec<_>>();
    assert_eq!([0, 1, 2, 3, 7].map(holders), [[0], [1], [2], [0], [1]].map(|rank| rank.to_vec()));
    assert_eq!("tp2".parse::<Cut>().unwrap().ordinals(0), Ordinals::ALL);
    assert!(Ordinals::ALL.holds(u64::MAX) && !Ordinals { step: 0, first: 0 }.holds(0));
}

proptest! {
    #[test]
    fn a_printed_cut_parses_to_itself(cut in cuts()) {
        prop_assert_eq!(cut.to_string().parse::<Cut>(), Ok(cut));
    }

    #[test]
    fn any_text_gives_a_cut_or_an_error(text in "[ptdc+0-9.,]{0,16}|\\PC{0,8}") {
        if let Ok(cut) = text.parse::<Cut>() {
            prop_assert!(cut.rank_count() >= 1);
        }
    }

    /// Every rank belongs to the one part that its coordinates say.
    #[test]
    fn parts_divide_the_ranks(cut in cuts()) {
        let mut seen = BTreeSet::new();
        for dp_rank in 0..cut.dp_size() {
            for rank in cut.ranks_of(dp_rank) {
                prop_assert_eq!(cut.coordinates(rank).unwrap().dp_rank, dp_rank);
                prop_assert!(seen.insert(rank));
            }
        }
        prop_assert!(seen.into_iter().eq(0..cut.rank_count()));
    }

    /// Layers dealt to the stages one by one, like cards, make the stages' sizes.
    #[test]
    fn even_stages_are_contiguous_and_as_equal_as_can_be(pp_size in 1..40u32, more in 0..100u32) {
        let hidden_layers = pp_size + more;
        let mut sizes = vec![0; pp_size as usize];
        (0..hidden_layers as usize).for_each(|card| sizes[card % pp_size as usize] += 1);
        let cut = Cut::new(pp_size, 1).unwrap();
        let mut next = 0;
        for (stage, size) in (0..).zip(sizes) {
            prop_assert_eq!(cut.stage_layers(stage, hidden_layers), Ok(layers(next..next + size)));
            next += size;
        }
        prop_assert_eq!(cut.stage_layers(pp_size, hidden_layers), Ok(vec![]));
    }

    #[test]
    fn counted_stages_are_contiguous(counts in prop::collection::vec(1..50u32, 2..20)) {
        let cut = Cut::with_layer_counts(counts.clone(), 1).unwrap();
        let hidden_layers = counts.iter().sum();
        let mut next = 0;
        for (stage, count) in (0..).zip(counts) {
            prop_assert_eq!(cut.stage_layers(stage, hidden_layers), Ok(layers(next..next + count)));
            next += count;
        }
    }

    #[test]
    fn listed_stages_are_the_lists(lists in lists()) {
        let cut = Cut::with_layer_lists(&lists, 1).unwrap();
        let hidden_layers = u32::try_from(lists.iter().map(Vec::len).sum::<usize>()).unwrap();
        for (stage, list) in (0..).zip(lists) {
            prop_assert_eq!(cut.stage_layers(stage, hidden_layers), Ok(list));
        }
        prop_assert_eq!(cut.stage_layers(4, hidden_layers), Ok(vec![]));
    }
}
