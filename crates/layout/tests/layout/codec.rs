//! The binary form and the JSON form.

use std::error::Error;

use kvferry_layout::{
    Cut, DecodeError, Dtype, LayerMask, LayoutError, ModelFacts, PageTable, Pooling, Storage, TABLE_BYTES_MAX,
    TableOptions, build,
};
use proptest::prelude::*;

use crate::tables::{config_of, full_table, mask_of, seed_table, tables};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Format 2, spelt out: a change of these bytes needs another version number.
#[test]
fn format_2_byte_by_byte() {
    let expected = [
        "4b5654 02",                                                    // "KVT", format
        "04 00",                                                        // hidden layers, data-parallel rank
        "02",                                                           // shapes of pools
        "00 08 808001 808001",                                          // host, 8 slots, stride and bytes 16384
        "00 08 8042 8042",                                              // host, 8 slots, stride and bytes 8448
        "02",                                                           // runs of pools
        "00 01 00 00 00 00",                // one of shape 0, at index 0 and base 0; no step
        "01 01 01 00 00 00",                // one of shape 1, at index 1 and base 0; no step
        "01",                               // groups
        "00 20 00 01 00",                   // paged, 32 tokens, no window, ordinals of step 1 from 0
        "02",                               // shapes of rows
        "00 01 8020",                       // key, f16, 4096 B
        "01 00 8001 8020 8001 00 01 01 20", // one plane: offset, cell, unit and token strides, units 0..1 of 1, tokens
        "03 03 8021",                       // indexer key, fp8_e4m3, 4224 B
        "02 00 8001 8020 8001 00 01 01 20 8020 04 8001 04 00 01 01 20", // keys, then scales
        "02",                               // runs of rows
        "00 04 00 00 00 00 01 01 00 8020",  // 4 of shape 0, from index, layer, pool, offset 0 on; step 1, 1, 0, 4096
        "01 02 04 00 01 00 01 02 00 8021",  // 2 of shape 1, from index 4, layer 0, pool 1, offset 0; step 1, 2, 0, 4224
    ];
    let expected = expected.concat().replace(' ', "");
    assert_eq!(hex(&seed_table(mask_of("TFTF")).to_bytes()), expected);
}

#[test]
fn json_form() {
    let text = include_str!("../golden/seed_tftf.table.json");
    assert_eq!(PageTable::from_json(text).unwrap(), seed_table(mask_of("TFTF")));
    assert_eq!(seed_table(mask_of("TFTF")).to_json() + "\n", text);
}

/// What is not said of requests and blocks is: all of them.
#[test]
fn json_may_leave_shares_out() {
    let text = seed_table(mask_of("TFTF")).to_json();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json.as_object_mut().unwrap().remove("dp_rank").unwrap();
    json["groups"][0]["kind"]["Paged"].as_object_mut().unwrap().remove("ordinals").unwrap();
    assert_eq!(PageTable::from_json(&json.to_string()).unwrap(), seed_table(mask_of("TFTF")));
}

#[test]
fn layers_cost_nothing() {
    let config = r#"{"model_type": "qwen3_moe", "num_hidden_layers": 94, "num_key_value_heads": 4, "head_dim": 128}"#;
    let facts = ModelFacts::from_config(config).unwrap();
    let options = TableOptions::new(64, Dtype::Fp8E4m3, 100_000);
    let table = build(&facts, &"tp1".parse().unwrap(), 0, &options).unwrap();
    assert_eq!(table.rows().count(), 188);
    assert!(table.to_bytes().len() < 100, "{} B", table.to_bytes().len());

    // Nor do layers that each have two pools of their own, wherever these are a step apart.
    for pooling in [Pooling::LayerTogether, Pooling::LayerStacked, Pooling::LayerSplit] {
        let options = TableOptions { storage: Storage { pooling, ..options.storage }, ..options };
        let mut table = build(&facts, &"tp1".parse().unwrap(), 0, &options).unwrap();
        assert!(table.to_bytes().len() < 100, "{} B", table.to_bytes().len());
        for (id, pool) in (0..).zip(&mut table.pools) {
            pool.base = 0x7f00_0000_0000 + id * 0x1234_5000;
        }
        assert!(table.to_bytes().len() < 120, "{} B", table.to_bytes().len());
        assert_eq!(PageTable::from_bytes(&table.to_bytes()).unwrap(), table);

        // Addresses in no order cost what they are: some 7 B each.
        for (pool, nth) in table.pools.iter_mut().zip(1u64..) {
            pool.base = 0x7f00_0000_0000 + (nth * nth * 7919 % 100_003) * 0x20_0000;
        }
        let bytes = table.to_bytes();
        assert!(bytes.len() < table.pools.len() * 10 + 100, "{} B", bytes.len());
        assert_eq!(PageTable::from_bytes(&bytes).unwrap(), table);
    }
}

/// A pool may end with the address space, and the next one may start again from its beginning.
#[test]
fn bases_of_any_size() {
    let mut table = seed_table(mask_of("TTTT"));
    let mut pool = table.pools[1].clone();
    for base in [u64::MAX - 10_000_000, 0, 1 << 63, (1 << 63) - 1] {
        pool.base = base;
        table.pools.push(pool.clone());
    }
    table.check().unwrap();
    assert_eq!(PageTable::from_bytes(&table.to_bytes()).unwrap(), table);
}

#[test]
fn bytes_that_are_no_table() {
    let good = full_table().to_bytes();
    let message = |bytes: &[u8]| PageTable::from_bytes(bytes).unwrap_err().to_string();
    assert_eq!(message(b""), "not an encoded page table");
    assert_eq!(message(b"KVT"), "not an encoded page table");
    assert_eq!(message(b"KVX\x01"), "not an encoded page table");
    assert_eq!(message(b"KVT\x01"), "page table of format 1, this side reads 2");
    assert_eq!(message(&[&good[..], b"more"].concat()), "4 B left over behind the page table");
    assert_eq!(message(&vec![0; TABLE_BYTES_MAX + 1]), "1048577 B of table, at most 1048576 are read");
    for end in 4..good.len() {
        let error = PageTable::from_bytes(&good[..end]).unwrap_err();
        assert!(matches!(error, DecodeError::Malformed(_)) && error.source().is_some(), "{end} B: {error}");
    }
    let mut spoilt = full_table();
    spoilt.pools[1].slot_stride = 1;
    let error = PageTable::from_bytes(&spoilt.to_bytes()).unwrap_err();
    assert!(matches!(error, DecodeError::Table(LayoutError::SlotStride { .. })), "{error}");
}

#[test]
fn runs_that_do_not_fit() {
    // The seed table without an indexer: the run of its four rows is the last thing in it.
    let good = seed_table(LayerMask::none(4)).to_bytes();
    let run = good.len() - 10;
    assert_eq!(hex(&good[run..]), "04000000000101008020");
    let with = |tail: &[u8]| PageTable::from_bytes(&[&good[..run], tail].concat()).unwrap_err();
    let message = |tail: &[u8]| with(tail).to_string();
    // Step of index 0: the second row's place is taken. Step 2: it is past the end of the list.
    assert_eq!(message(b"\x04\0\0\0\0\0\x01\0\x80\x20"), "group 0: run 0 of rows does not fit");
    assert_eq!(message(b"\x04\0\0\0\0\x02\x01\0\x80\x20"), "group 0: run 0 of rows does not fit");
    // First layer u32::MAX: the next one overflows.
    assert_eq!(message(b"\x04\0\xff\xff\xff\xff\x0f\0\0\x01\x01\0\x80\x20"), "group 0: run 0 of rows does not fit");
    assert_eq!(message(b"\xff\xff\x03\0\0\0\0\x01\x01\0\x80\x20"), "65535 rows, at most 8192 are allowed");
    // No such shape: it is the byte before the run's count.
    let mut spoilt = good.clone();
    spoilt[run - 1] = 1;
    assert_eq!(PageTable::from_bytes(&spoilt).unwrap_err().to_string(), "group 0: run 0 of rows does not fit");

    // The run of pools: shape, count, index, base and the step of both.
    let pools = b"\0\x01\0\0\0\0";
    let at = good.windows(6).position(|bytes| bytes == pools).unwrap();
    for (spoilt, message) in [
        (b"\x01\x01\0\0\0\0", "run 0 of pools does not fit"),
        (b"\0\x01\x01\0\0\0", "run 0 of pools does not fit"),
        (b"\0\x02\0\0\0\0", "run 0 of pools does not fit"),
    ] {
        let bytes = [&good[..at], spoilt, &good[at + 6..]].concat();
        assert_eq!(PageTable::from_bytes(&bytes).unwrap_err().to_string(), message);
    }
    let bytes = [&good[..at], b"\0\x81\x20\0\0\x01\0", &good[at + 6..]].concat();
    assert_eq!(PageTable::from_bytes(&bytes).unwrap_err().to_string(), "4097 pools, at most 4096 are allowed");
}

/// A shape that breaks a limit is named by the first row that has it.
#[test]
fn limits_name_a_row() {
    let mut spoilt = seed_table(mask_of("FTFF"));
    spoilt.groups[0].rows[4].planes.clear();
    let error = PageTable::from_bytes(&spoilt.to_bytes()).unwrap_err();
    assert_eq!(error.to_string(), "pool 1, layer 1, indexer key: 0 planes, 1 to 8 are allowed");
}

#[test]
fn text_that_is_no_table() {
    let message = |text: &str| PageTable::from_json(text).unwrap_err().to_string();
    assert_eq!(message("{}"), "not a page table in JSON");
    let json = full_table().to_json();
    assert_eq!(message(&json.replace("\"window_tokens\"", "\"window_token\"")), "not a page table in JSON");
    assert_eq!(message(&json.replace("\"hidden_layers\": 2", "\"hidden_layers\": 0")), "a model of 0 hidden layers");
}

proptest! {
    #[test]
    fn decoding_undoes_encoding(table in tables()) {
        prop_assert_eq!(&PageTable::from_bytes(&table.to_bytes()).unwrap(), &table);
        prop_assert_eq!(&PageTable::from_json(&table.to_json()).unwrap(), &table);
    }

    #[test]
    fn any_bytes_give_a_checked_table_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), head in any::<bool>()) {
        let bytes = if head { [b"KVT\x02", &bytes[..]].concat() } else { bytes };
        if let Ok(table) = PageTable::from_bytes(&bytes) {
            prop_assert_eq!(table.check(), Ok(()));
        }
    }

    #[test]
    fn spoilt_bytes_give_a_checked_table_or_an_error(
        table in tables(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3u8), 1..6),
    ) {
        let mut bytes = table.to_bytes();
        for (place, byte, edit) in edits {
            let place = place.index(bytes.len());
            match edit {
                0 => bytes[place] = byte,
                1 => bytes.insert(place, byte),
                _ => drop(bytes.remove(place)),
            }
        }
        if let Ok(table) = PageTable::from_bytes(&bytes) {
            prop_assert_eq!(table.check(), Ok(()));
            prop_assert_eq!(&PageTable::from_bytes(&table.to_bytes()).unwrap(), &table);
        }
    }

    #[test]
    fn every_rank_of_every_cut_survives_the_wire(pp in 1..27u32, tp in 1..9u32, mtp in any::<bool>(), rank in any::<prop::sample::Index>()) {
        let facts = ModelFacts::from_config(&config_of("glm-5.2")).unwrap();
        let options = TableOptions { mtp, ..TableOptions::new(64, Dtype::Bf16, 9) };
        let cut = Cut::new(pp, tp).unwrap();
        let rank = u32::try_from(rank.index(cut.rank_count() as usize)).unwrap();
        let table = build(&facts, &cut, rank, &options).unwrap();
        let bytes = table.to_bytes();
        prop_assert!(bytes.len() < 200);
        prop_assert_eq!(PageTable::from_bytes(&bytes).unwrap(), table);
    }
}
