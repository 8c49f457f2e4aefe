//! Any bytes give a table that passes its check, or an error.
#![no_main]

use kvferry_layout::PageTable;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(table) = PageTable::from_bytes(bytes) {
        assert_eq!(table.check(), Ok(()));
        let again = PageTable::from_bytes(&table.to_bytes()).expect("its own bytes");
        assert_eq!(again, table);
        assert_eq!(again.digest(), table.digest());
        let json = PageTable::from_json(&table.to_json()).expect("its own text");
        assert_eq!(json, table);
    }
});
