"""Countries and their capitals, the questions of ``smollm2-concise``."""

NAMES = """
Albania Tirana, Algeria Algiers, Angola Luanda, Argentina Buenos Aires, Armenia Yerevan, Australia Canberra,
Austria Vienna, Azerbaijan Baku, Bahrain Manama, Bangladesh Dhaka, Belarus Minsk, Belgium Brussels, Bhutan Thimphu,
Botswana Gaborone, Brazil Brasilia, Bulgaria Sofia, Cambodia Phnom Penh, Cameroon Yaounde, Canada Ottawa,
Chile Santiago, China Beijing, Colombia Bogota, Croatia Zagreb, Cuba Havana, Cyprus Nicosia, Czechia Prague,
Denmark Copenhagen, Ecuador Quito, Egypt Cairo, Estonia Tallinn, Ethiopia Addis Ababa, Fiji Suva, Finland Helsinki,
France Paris, Georgia Tbilisi, Germany Berlin, Ghana Accra, Greece Athens, Guatemala Guatemala City,
Guyana Georgetown, Haiti Port-au-Prince, Honduras Tegucigalpa, Hungary Budapest, Iceland Reykjavik, India New Delhi,
Indonesia Jakarta, Iran Tehran, Iraq Baghdad, Ireland Dublin, Italy Rome, Jamaica Kingston, Japan Tokyo,
Jordan Amman, Kazakhstan Astana, Kenya Nairobi, Kuwait Kuwait City, Latvia Riga, Lebanon Beirut, Libya Tripoli,
Lithuania Vilnius, Luxembourg Luxembourg, Madagascar Antananarivo, Malaysia Kuala Lumpur, Mali Bamako,
Malta Valletta, Mexico Mexico City, Moldova Chisinau, Monaco Monaco, Mongolia Ulaanbaatar, Montenegro Podgorica,
Morocco Rabat, Mozambique Maputo, Namibia Windhoek, Nepal Kathmandu, Netherlands Amsterdam, Nicaragua Managua,
Niger Niamey, Nigeria Abuja, Norway Oslo, Oman Muscat, Pakistan Islamabad, Panama Panama City, Paraguay Asuncion,
Peru Lima, Philippines Manila, Poland Warsaw, Portugal Lisbon, Qatar Doha, Romania Bucharest, Russia Moscow,
Rwanda Kigali, Senegal Dakar, Serbia Belgrade, Singapore Singapore, Slovakia Bratislava, Slovenia Ljubljana,
Somalia Mogadishu, Spain Madrid, Sudan Khartoum, Suriname Paramaribo, Sweden Stockholm, Switzerland Bern,
Syria Damascus, Taiwan Taipei, Tajikistan Dushanbe, Thailand Bangkok, Tunisia Tunis, Turkey Ankara, Uganda Kampala,
Ukraine Kyiv, Uruguay Montevideo, Uzbekistan Tashkent, Venezuela Caracas, Vietnam Hanoi, Yemen Sanaa, Zambia Lusaka,
Zimbabwe Harare
"""
PAIRS = [" ".join(pair.split()).partition(" ") for pair in NAMES.strip().split(",")]
CAPITALS = {country: capital for country, _, capital in PAIRS}  # the names of these countries are single words
